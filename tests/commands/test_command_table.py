"""The table of commands: help and completion from it, and each command where it says."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from cloudai_mbridge.cli import cli
from cloudai_mbridge.commands.table import SECTIONS
from tests.cases import every

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


def completed(*words: str) -> list[str]:
    """Return what a shell completes the last word to."""
    return [item.value for item in ShellComplete(cli, {}, "mbridge", "_X").get_completions([*words[:-1]], words[-1])]


@every(
    ("words", "found"),
    [
        (("estimate", "--recipe", "llama3_"), ["llama3_70b", "llama3_8b"]),
        (("tune", "--recipe", "LLAMA3_7"), ["llama3_70b"]),
        (("init", "--recipe", "gpt_t"), ["gpt_tiny"]),
        (("proxy", "kimi"), ["kimi_k2"]),
        (("estimate", "--gpu", "gb"), ["gb200", "gb300"]),
        (("tune", "--gpu", "h"), ["h100", "h200"]),
        (("calibrate", "--gpu", "a1"), ["a100"]),
        (("init", "--gpu", "b3"), ["b300"]),
        (("rule", "C0"), [f"C0{number}" for number in range(1, 10)]),
        (("rule", "C01", "m01"), ["M01"]),
        (("estimate", "--precision", "fp8_m"), ["fp8_mx"]),
        (("tune", "--precision", "bf"), ["bf16"]),
        (("estimate", "--release", "0.3"), ["0.3.0", "0.3.1"]),
        (("estimate", "--release", "n"), ["none"]),
        (("estimate", "--recompute", "mla"), ["mla_up_proj"]),
        (("estimate", "--cuda-graph", "l"), ["local"]),
        (("estimate", "--flops-formula", "o"), ["old"]),
        (("history", "trend", "--metric", "step_time_s"), ["step_time_s"]),
        (("estimate", "--recipe", "nothing_like_it"), []),
    ],
)
def test_completion_knows_names(words: tuple[str, ...], found: list[str]) -> None:
    assert completed(*words) == found


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
