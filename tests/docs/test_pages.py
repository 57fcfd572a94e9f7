"""README and docs: the commands that they show exist, so do the files, and the site builds without a broken link."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt
from markdown_it.token import Token

from cloudai_mbridge.cli import cli
from tests.cases import every

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
SHELL = ("console", "sh")
# In inline code, words such as these stand for a value: `mbridge gate RESULT --policy FILE`
PLACEHOLDER = re.compile(r"[A-Z][A-Z_.]*|\.\.\.|\[.*\]")
PACKAGES = {path.parent.name for path in (REPOSITORY / "cloudai_mbridge").glob("*/__init__.py")}
SHIPPED = ("conf/", "systems/", "test_defs/")
WRITTEN_BY_THE_READER = {
    "conf/baselines/default.toml",
    "conf/gates/nightly.toml",
    "conf/scenarios/mine.toml",
    "conf/scenarios/nightly.toml",
    "test_defs/deepseek_v3_4_layers.toml",
    "test_defs/llama3_70b_64.toml",
    "conf/experimental/megatron_bridge",  # in CloudAI's repository
}


def tokens(page: Path) -> Iterator[Token]:
    """Yield the page's fenced blocks and pieces of inline code."""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        yield from (child for child in token.children or () if child.type == "code_inline")
        if token.type == "fence":
            yield token


def command_lines() -> Iterator[tuple[str, str]]:
    """Yield the page and the text of every command line of make, mbridge and Python."""
    for page in PAGES:
        for token in tokens(page):
            text = token.content.replace("\\\n", " ")
            shell = token.type == "fence" and token.info in SHELL
            for line in text.splitlines() if shell or token.type == "code_inline" else ():
                for command in re.split(r"&&|\|\||[;|]", line.removeprefix("$ ").partition(" #")[0]):
                    command = re.sub(r"^[\s(]*(\w+=\S* )*", "", command).strip()
                    if re.match(r"(\.venv/bin/)?(mbridge|make|python3?) +\S", command):
                        yield page.name, command


COMMANDS = sorted(set(command_lines()))


def words_of(command: str) -> list[str]:
    return [word for word in shlex.split(command) if word not in ("...",)]


@every(("page", "command"), COMMANDS)
def test_a_command_exists_with_its_options(page: str, command: str) -> None:
    program, *words = words_of(command)
    if program.endswith("make"):
        check_target(words)
    elif program.endswith("mbridge"):
        check_mbridge(words)
    elif "-m" in words[:2]:
        module = words[words.index("-m") + 1]
        assert module in ("venv", "pip") or importlib.util.find_spec(module), f"no module {module}"


def check_target(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets, f"the Makefile has no target {word}"


def check_mbridge(words: list[str]) -> None:
    """Follow the words through click's commands; every option exists, and every shipped file."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found, f"mbridge has no command {name}"
        command = found
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options | {"--help", "-h"}, f"{command.name} has no option {word}"
        elif word.startswith(SHIPPED) and not PLACEHOLDER.search(word):
            assert word in WRITTEN_BY_THE_READER or (REPOSITORY / word).exists(), f"{word} does not exist"


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 80, "the pages' commands are read"


def predictions() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of the pages that predict, with the output that the page shows."""
    for page in PAGES:
        for token in MarkdownIt().parse(page.read_text()):
            if token.type == "fence" and re.match(r"\$ mbridge (estimate|tune) ", token.content):
                command, *shown = token.content.splitlines()
                yield command.removeprefix("$ mbridge "), shown


@every(("command", "shown"), list(predictions()))
def test_predictions_are_what_the_command_prints(command: str, shown: list[str]) -> None:
    """Every line that is shown is printed; "..." stands for lines, or for the end of one."""
    done = CliRunner().invoke(cli, shlex.split(command))
    assert done.exit_code == 0, done.output
    printed = [line.rstrip() for line in done.output.splitlines()]
    for line in shown:
        if line.endswith("..."):
            assert any(each.startswith(line.removesuffix("...")) for each in printed), line
        elif line.startswith(("│", "deepseek", "step times", "published", "CUDA")):
            assert line in printed, line


def test_predictions_are_found() -> None:
    assert len(list(predictions())) == 2


@every("page", PAGES)
def test_files_of_the_product_that_a_page_names_exist(page: Path) -> None:
    """Python files, and whatever is named by a path that begins with a package, such as `verdict/failures.toml`."""
    for token in tokens(page):
        if token.type == "code_inline":
            for name in re.findall(r"(?<![\w./])(?!scripts/)[\w./*]+/[\w./*]*", token.content):  # scripts/: upstream
                if name.endswith(".py") or name.partition("/")[0] in PACKAGES:
                    pattern = name.rstrip("/").replace("NAME", "*")
                    places = [*REPOSITORY.glob(pattern), *(REPOSITORY / "cloudai_mbridge").glob(pattern)]
                    assert places, f"{page.name} names {name}"


@every("page", PAGES)
def test_toml_is_toml(page: Path) -> None:
    for token in tokens(page):
        if token.type == "fence" and token.info == "toml":
            tomllib.loads(token.content)


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_links_of_the_pages_outside_the_site(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().split()) <= 800
