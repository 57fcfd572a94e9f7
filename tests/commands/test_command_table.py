"""The table of commands: help and completion from it, and each command where it says."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cloudai_mbridge.cli import cli
from cloudai_mbridge.commands.table import SECTIONS

CONTEXT = click.Context(cli)
NAMES = [name for section in SECTIONS.values() for name in section]


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_where_the_table_says(name: str) -> None:
    command = cli.get_command(CONTEXT, name)
    assert command is not None
    assert command.name == name
    assert command.help


def test_help_shows_every_command_whole() -> None:
    shown = cli.get_help(CONTEXT)
    for section, commands in SECTIONS.items():
        assert f"\n{section}:\n" in shown
        assert all(text in shown for _, text in commands.values())
    assert all(not text.endswith("...") for text in shown.splitlines()[1:])


def test_completion_knows_commands_and_options() -> None:
    assert [item.value for item in cli.shell_complete(CONTEXT, "ver")] == ["verify-configs"]
    assert {item.value for item in cli.shell_complete(CONTEXT, "--")} >= {"--help", "--version"}


@pytest.mark.process
def test_a_wrong_name_gets_a_suggestion_and_none_the_help() -> None:
    def mbridge(*argv: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "cloudai_mbridge", *argv], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert mbridge("swep") == (2, "error: No such command 'swep'. Did you mean 'sweep'?\n")
    code, text = mbridge()
    assert (code, text.splitlines()[0]) == (2, "Usage: mbridge [OPTIONS] COMMAND [ARGS]...")


@pytest.mark.process
def test_help_and_completion_import_no_command() -> None:
    for code in ("cli.get_help(context)", "cli.shell_complete(context, '')"):
        program = f"import click, sys; from cloudai_mbridge.cli import cli; context = click.Context(cli); {code}"
        printed = subprocess.run(
            [sys.executable, "-c", f"{program}; print(*sys.modules)"], capture_output=True, text=True, check=True
        ).stdout.split()
        assert not {"pydantic", "numpy", "torch", "cloudai_mbridge.pipeline"} & set(printed)


@pytest.mark.process
def test_the_documented_completion_works_in_bash(tmp_path: Path) -> None:
    (tmp_path / "results" / "sweep_2026-11-25_10-31-37").mkdir(parents=True)
    page = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text()
    (line,) = [line for line in page.splitlines() if "_MBRIDGE_COMPLETE=bash_source" in line]
    program = f"""{line}
for words in "mbridge ver" "mbridge status sw" "mbridge run --max"; do
  COMPREPLY=(); COMP_WORDS=($words); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
  _mbridge_completion mbridge; echo "${{COMPREPLY[@]}}"
done"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout.split("\n")[:3] == ["verify-configs", "sweep_2026-11-25_10-31-37", "--max-parallel"], done.stderr


@pytest.mark.process
def test_output_that_is_not_read_to_its_end_is_not_a_failed_point() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as out:
        command = [sys.executable, "-m", "cloudai_mbridge", "schema", "scenario"]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")
