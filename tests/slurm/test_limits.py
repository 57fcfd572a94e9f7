"""Limits as Slurm prints them, and the file system of the results. A real cluster: tests/e2e/test_slurm_limits.py."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.schedulers.slurm import limits
from cloudai_mbridge.schedulers.slurm.command import Answer
from cloudai_mbridge.schedulers.slurm.output_path import judge_output_path

SYSTEM = {"name": "c", "scheduler": "slurm", "default_partition": "main", "partitions": [{"name": "main"}]}
RUNS: list[Any] = [SimpleNamespace(test_id="t", time_limit="2:00:00", time_limit_s=7200.0, num_nodes=3)]
MOUNTS = """/dev/vda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/ada/ram\\040disk tmpfs rw 0 0
"""


def ask(monkeypatch: pytest.MonkeyPatch, config: str = "ClusterName = c\n", **system: Any) -> tuple[str, ...]:
    """Check the runs on a fake cluster whose partition has two nodes and allows an hour."""

    def fake(*argv: str, **options: Any) -> Answer:
        return Answer(0, "main|1:00:00|1-infinite|2\n" if argv[0] == "sinfo" else config, "")

    monkeypatch.setattr(limits, "run_command", fake)
    return limits.check_limits(SlurmSystem.model_validate(SYSTEM | system), RUNS)


def test_every_limit_that_is_exceeded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput) as refused:
        ask(monkeypatch)
    time, nodes = str(refused.value).splitlines()
    assert "time_limit: 02:00:00 is more than partition main allows (01:00:00); lower it" in time
    assert "num_nodes: 3 is more than partition main has (2); lower it" in nodes


@pytest.mark.parametrize(
    ("config", "system"),
    [
        ("ClusterName = c\nJobSubmitPlugins = lua\n", {}),
        ("ClusterName = c\n", {"extra_sbatch_args": ["--partition=big"]}),
        ("ClusterName = c\n", {"extra_sbatch_args": ["--part=big"]}),
        ("ClusterName = c\n", {"extra_sbatch_args": ["-tlater", "--nodes=2"]}),
    ],
    ids=["a plugin may change the job", "another partition", "a prefix of the option", "the values themselves"],
)
def test_what_slurm_alone_can_decide_is_no_violation(
    monkeypatch: pytest.MonkeyPatch, config: str, system: dict[str, Any]
) -> None:
    lines = ask(monkeypatch, config, **system)
    assert sum("not evaluated: " in line for line in lines) == 3, lines


def test_options_that_replace_nothing_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput):
        ask(monkeypatch, extra_sbatch_args=["--exclusive", "--tmp=1G", "--nodelist=n1", "-J x"])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("a|1-02:00:00|1-8|16", (93600.0, 8.0, 16)),
        ("a|infinite|1-infinite|16", (math.inf, math.inf, 16)),
        ("a|n/a|4|", (math.inf, 4.0, None)),
        ("a", (math.inf, math.inf, None)),
    ],
)
def test_partitions_of_sinfo(row: str, expected: tuple[float, float, int | None]) -> None:
    found = limits.parse_partitions(f"{row}\n\n")["a"]
    assert (found.time_s, found.job_nodes, found.num_nodes) == expected


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/home/ada/results", "/home/ada/results is on nfs4"),
        ("/home/ada/ram disk/results", "warning: "),
        ("/tmp/results", "warning: "),
        ("/var/tmp/results", "warning: "),
        ("/data/results", "not evaluated: whether the nodes see /data/results (ext4)"),
    ],
)
def test_the_file_system_of_the_results(path: str, words: str) -> None:
    assert judge_output_path(Path(path), MOUNTS).startswith(f"output path: {words}")


def test_what_is_mounted_on_a_directory_of_every_machine_may_be_shared() -> None:
    assert "is on lustre" in judge_output_path(Path("/tmp/results"), f"{MOUNTS}l:/ /tmp lustre rw 0 0\n")
