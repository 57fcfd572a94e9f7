"""Bad input gives one clear line and exit code 2; nothing is written or submitted."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import cli
from tests.cases import every
from tests.golden import Sentence

TEST = """
name = "t"
description = "d"
[cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
num_gpus = 2
"""
SCENARIO = """
name = "s"
[[Tests]]
id = "a"
test_name = "t"
"""
LOCAL = 'name = "local"\nscheduler = "local"\n'
SLURM = 'name = "c"\nscheduler = "slurm"\ndefault_partition = "nope"\n[[partitions]]\nname = "main"\n'


class Case:
    """A set of good files, of which a test spoils one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.output = directory / "out"
        (directory / "tests").mkdir()
        self.write(system=LOCAL, test=TEST, scenario=SCENARIO)

    def write(self, **files: str) -> None:
        names = {"test": "tests/t.toml", "other_test": "tests/u.toml"}
        for name, text in files.items():
            (self.directory / names.get(name, f"{name}.toml")).write_text(text)

    def argv(self, command: str) -> list[str]:
        d = self.directory
        files = [
            "--system-config",
            d / "system.toml",
            "--tests-dir",
            d / "tests",
            "--test-scenario",
            d / "scenario.toml",
        ]
        return ["mbridge", command, *map(str, [*files, "--output-dir", self.output])]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def unwritable(case: Case) -> None:
    """A file where a directory is needed: not writable for root either."""
    (case.directory / "file").write_text("")
    case.output = case.directory / "file" / "out"


def scenario_with(extra: str) -> Callable[[Case], None]:
    return lambda case: case.write(scenario=SCENARIO + extra)


def with_test(extra: str) -> Callable[[Case], None]:
    return lambda case: case.write(test=TEST + extra)


CYCLE = """
[[Tests.dependencies]]
type = "start_post_comp"
id = "b"
[[Tests]]
id = "b"
test_name = "t"
[[Tests.dependencies]]
type = "start_post_comp"
id = "a"
"""

# What spoils the files, and the place, key and value that the line names
CASES: dict[str, tuple[Callable[[Case], None], tuple[str, ...]]] = {
    "broken TOML": (with_test("tp = ["), ("t.toml",)),
    "unknown key": (with_test("seqlength = 8"), ("t.toml:8: cmd_args.seqlength", "'seq_length'")),
    "wrong type": (with_test('tp = "two"'), ("t.toml:8: cmd_args.tp", "'two'")),
    "missing test": (
        lambda case: case.write(scenario=SCENARIO.replace('"t"', '"tt"')),
        ("scenario.toml:5: Tests[0].test_name", "'tt'"),
    ),
    "unknown recipe": (
        lambda case: case.write(test=TEST.replace("gpt_tiny", "gpt_tyni")),
        ("cmd_args.model_recipe_name", "'gpt_tyni'"),
    ),
    "empty sweep list": (with_test("tp = []"), ("t.toml:8: cmd_args.tp",)),
    "unwritable output": (unwritable, ("--output-dir",)),
    "duplicate ids": (scenario_with('[[Tests]]\nid = "a"\ntest_name = "t"'), ("scenario.toml", "'a'")),
    "cyclic dependency": (scenario_with(CYCLE), ("scenario.toml", "a -> b -> a")),
    "missing system file": (lambda case: (case.directory / "system.toml").unlink(), ("system.toml",)),
    "unknown scheduler": (lambda case: case.write(system='name = "x"\nscheduler = "pbs"\n'), ("'pbs'",)),
    "two tests of one name": (lambda case: case.write(other_test=TEST), ("u.toml", "'t'", "t.toml")),
    "no step to measure": (
        with_test("max_steps = 3\n[metrics]\nwarmup_steps = 3"),
        ("max_steps = 3", "warmup_steps = 3"),
    ),
    "unknown override": (with_test('[extra_cmd_args]\n"model.num_layer" = "2"'), ("model.num_layer", "num_layers")),
    "time limit": (scenario_with('time_limit = "1 hour"'), ("scenario.toml:6: Tests[0].time_limit", "'1 hour'")),
}


@every(("command", "name"), [("dry-run", "broken TOML"), *(("run", name) for name in CASES)])
def test_one_line_and_exit_code_2(
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sentence: Sentence,
) -> None:
    spoil, expected = CASES[name]
    case = Case(tmp_path)
    spoil(case)
    monkeypatch.setattr("sys.argv", case.argv(command))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    assert error.startswith("error: ")
    for part in expected:
        assert part in error
    sentence(error)
    assert not case.output.exists()


def test_the_good_files_are_good(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", case.argv("dry-run"))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0, capsys.readouterr().err


@pytest.mark.slurm
def test_partition_that_only_slurm_knows_not_to_exist(
    case: Case, cluster: Any, mbridge: Any, sentence: Sentence
) -> None:
    case.write(system=SLURM.replace('"main"', '"nope"'))
    done = mbridge(*case.argv("run")[1:], env=cluster.env)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    sentence(done.stderr)
    assert not case.output.exists()


@pytest.mark.long
def test_a_cluster_that_does_not_answer_is_the_tools_failure(case: Case, mbridge: Any, tmp_path: Path) -> None:
    case.write(system=SLURM.replace('"main"', '"nope"'))
    done = mbridge(*case.argv("run")[1:], env={"SLURM_CONF": str(tmp_path / "none"), "PATH": os.environ["PATH"]})
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not case.output.exists()
