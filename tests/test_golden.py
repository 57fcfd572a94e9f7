"""tests/golden.py, in sessions on small tests; and tests/sentences.txt, which names tests that there are."""

import ast
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from tests import golden
from tests.golden import DIRECTORY, FILE, HEAD, WRITE, parse, plain, render, without_host

REPOSITORY = Path(__file__).parents[1]

CONFTEST = """
from tests import golden, workers
from tests.golden import golden_file, sentence

pytest_addoption = workers.pytest_addoption

def pytest_configure(config):
    golden.pytest_configure(config)
    workers.pytest_configure(config)
"""
TEST_A = """
import pytest

@pytest.mark.parametrize("name", ["one", "two", "a third"])
def test_some(sentence, tmp_path, name):
    with pytest.raises(ValueError) as caught:
        raise ValueError(f"{tmp_path}/a.toml: WORD" + " of three" * (name == "a third"))
    sentence(caught)
    sentence("took 3.1 s\\n\\n  two lines", seconds=r"[0-9.]+ s")

def test_silent():
    pass
"""
TEST_B = """
def test_other(sentence):
    sentence("of b")

def test_file(golden_file, request):
    golden_file(request.path.with_name("of_b.txt"), "text of the file\\n")
"""
WRITTEN = f"""{HEAD}\
tests/test_a.py::test_some[a third]
  - <tmp>/a.toml: one word of three
  - took <seconds>

      two lines
tests/test_a.py::test_some[one]
tests/test_a.py::test_some[two]
  - <tmp>/a.toml: one word
  - took <seconds>

      two lines
tests/test_b.py::test_other
  - of b
"""


class Project:
    """A directory with tests."""

    def __init__(self, root: Path) -> None:
        self.tests, self.file = root / "tests", root / FILE
        self.tests.mkdir()
        (root / "pytest.ini").write_text("[pytest]\n")
        for name, text in {
            "conftest": CONFTEST,
            "test_a": TEST_A.replace("WORD", "one word"),
            "test_b": TEST_B,
        }.items():
            (self.tests / f"{name}.py").write_text(text)

    def run(self, *arguments: str, write: bool = False) -> tuple[int, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in (DIRECTORY, WRITE)}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "-p", "no:cacheprovider", *arguments],
            cwd=self.tests.parent,
            env={**inherited, "PYTHONPATH": str(REPOSITORY), **({WRITE: "1"} if write else {})},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def change(self, name: str, before: str, after: str) -> None:
        path = self.tests / name
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose golden files have been written."""
    project = Project(tmp_path_factory.mktemp("written"))
    code, output = project.run("--fork", "2", write=True)
    assert (code, "5 passed, 1 deselected" in output) == (0, True), output
    return project.tests.parent


@pytest.fixture
def project(written: Path, tmp_path: Path) -> Project:
    (made := Project(tmp_path)).file.write_text((written / FILE).read_text())
    shutil.copy(written / "tests" / "of_b.txt", made.tests)
    return made


# A session that writes


@pytest.mark.process
def test_what_is_written(written: Path) -> None:
    assert (written / FILE).read_text() == WRITTEN
    assert (written / "tests/of_b.txt").read_text() == "text of the file\n"


@pytest.mark.process
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_other_ways_to_run_write_the_same(tmp_path: Path, workers: tuple[str, ...]) -> None:
    project = Project(tmp_path)
    code, output = project.run(*workers, write=True)
    assert (code, project.file.read_text()) == (0, WRITTEN), output


@pytest.mark.process
def test_what_did_not_run_stays(project: Project) -> None:
    """So do the texts of a test that fails."""
    project.change("test_a.py", "one word", "another word")
    project.change("test_a.py", "sentence(caught)\n", "sentence(caught)\n    assert name != 'two'\n")
    project.change("test_b.py", "of b", "of another")
    code, output = project.run("-k", "some and not third", write=True)
    assert (code, "1 failed, 1 passed" in output) == (1, True), output
    changed = parse(WRITTEN)
    changed["tests/test_a.py::test_some[one]"][0] = "<tmp>/a.toml: another word"
    assert project.file.read_text() == render(changed)
    code, output = project.run("tests/test_b.py::test_other", write=True)
    changed["tests/test_b.py::test_other"] = ["of another"]
    assert (code, project.file.read_text()) == (0, render(changed)), output


@pytest.mark.process
def test_what_is_gone_is_dropped(project: Project) -> None:
    """A case of a file that was collected, a test that checks nothing any more, and a file; nothing of other files."""
    project.change("test_a.py", '"two", ', "")
    project.change("test_b.py", '    sentence("of b")', "    pass")
    code, output = project.run("tests/test_a.py::test_some[one]", write=True)
    assert (code, project.file.read_text()) == (0, WRITTEN), output
    code, output = project.run("tests/test_a.py", write=True)
    left = {node: texts for node, texts in parse(WRITTEN).items() if "[two]" not in node}
    assert (code, project.file.read_text()) == (0, render(left)), output
    code, output = project.run("tests/test_b.py", write=True)
    del left["tests/test_b.py::test_other"]
    assert (code, project.file.read_text()) == (0, render(left)), output
    (project.tests / "test_a.py").unlink()
    code, output = project.run(write=True)
    assert (code, project.file.read_text()) == (0, HEAD), output


# A session that compares


@pytest.mark.process
@pytest.mark.parametrize("arguments", [(), ("--fork", "2"), ("-k", "third")], ids=["alone", "fork", "one"])
def test_the_same_texts_pass(project: Project, arguments: tuple[str, ...]) -> None:
    code, output = project.run(*arguments)
    assert code == 0, output


@pytest.mark.process
def test_another_text_fails_its_tests(project: Project) -> None:
    project.change("test_a.py", "one word", "another word")
    project.change("test_b.py", "text of the file", "another text")
    code, output = project.run("--fork", "2")
    assert (code, "4 failed, 2 passed" in output) == (1, True), output
    for line in (
        "-  - <tmp>/a.toml: one word of three",
        "+  - <tmp>/a.toml: another word of three",
        "if that is meant: make golden TESTS=tests/test_a.py",
        "+another text",
        "if that is meant: make golden TESTS=tests/test_b.py",
    ):
        assert f"\n{line}\n" in output, output
    assert project.file.read_text() == WRITTEN


@pytest.mark.process
def test_more_and_fewer_texts_fail(project: Project) -> None:
    """A test without any among them."""
    project.change("test_a.py", "    sentence(caught)\n", "")
    project.change("test_a.py", "    pass", "    assert True")
    project.change("test_b.py", "(sentence):\n    sentence", "():\n    str")
    code, output = project.run("-k", "not file")
    assert (code, "4 failed, 1 passed" in output) == (1, True), output
    project.file.unlink()
    assert "4 failed" not in project.run("-k", "other or file")[1]
    code, output = project.run("-k", "some")
    assert (code, "3 failed" in output) == (1, True), output


# The text


def test_what_varies_is_hidden(tmp_path: Path) -> None:
    base = Path("/tmp/pytest-of-me/pytest-7")
    text = (
        f"{base}/gw1/test_x0/0/a.toml: in {base}/test_x_12: /tmp/tmpab12_cd9/b, {base}/x\n\n"
        f"\x1b[1;31m{REPOSITORY}/docs\x1b[0m by process 123 on 127.0.0.1:4567, 0x7f12ad0d24\t{sys.prefix}/bin/python \n"
    )
    assert plain(text, base / "gw1") == (
        "<tmp>/a.toml: in <tmp>: <tmp>/b, <tmp>/x\n\n"
        "<repository>/docs by process <pid> on 127.0.0.1:<port>, <address>\\t<environment>/bin/python"
    )
    assert plain("error: Missing option '--a'.", base) == "error: <click> '--a'"
    assert plain("error: Invalid value for '--b': 'c' is not a valid integer.", base) == (
        "error: Invalid value for '--b': 'c' <click>"
    )
    foreign = (
        "a.json: is damaged (Expecting value: line 1 column 1 (char 0)); b: Input should be 3; valid keys of C: d, e"
    )
    assert plain(foreign, base) == "a.json: is damaged (<json>); b: <pydantic>; valid keys of C: <keys>"
    assert without_host(f"on {socket.gethostname()}: x") == "on <host>: x"


def test_of_pydantics_errors_only_our_words_are_kept() -> None:
    class Model(pydantic.BaseModel):
        a: int
        b: int

        @pydantic.field_validator("b")
        @classmethod
        def _is_even(cls, value: int) -> int:
            if value % 2:
                raise ValueError("is odd")
            return value

    with pytest.raises(pydantic.ValidationError) as caught:
        Model.model_validate({"a": "x", "b": 1})
    assert golden._text(caught) == "is odd"


def test_every_text_can_be_read_again() -> None:
    texts = ["", "a\n\n  b\n- c\n  - d", "  - e", "tests/f.py::g", "# h"]
    entries = {"tests/a.py::test_b": texts, "tests/a.py::test_b[ - c]": ["d"], "tests/a.py::test_c": ["d"]}
    assert parse(render(entries)) == entries


def test_every_text_is_of_a_test() -> None:
    """Only the names are looked for; a session that runs a test finds cases and texts that are missing."""
    functions: dict[str, set[str]] = {}
    for node in parse((REPOSITORY / FILE).read_text()):
        file, *_, name = node.partition("[")[0].split("::")
        if file not in functions:
            tree = ast.parse(path.read_text()) if (path := REPOSITORY / file).exists() else ast.Module([], [])
            functions[file] = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        assert name in functions[file], f"there is no {node}: make golden TESTS={file}"
