"""Limits as Slurm prints them, and the file system of the results. A real cluster: tests/e2e/test_slurm_limits.py."""

import math
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.plan.launchers import EMBEDDED
from cloudai_mbridge.schedulers.slurm import limits, partitions
from cloudai_mbridge.schedulers.slurm.limits import judge_output_path
from cloudai_mbridge.schedulers.slurm.partitions import find_nodes, parse_nodes
from tests.golden import Sentence
from tests.runs import slurm_system

RUNS: list[Any] = [
    SimpleNamespace(test_id="t", time_limit="2:00:00", time_limit_s=7200.0, num_nodes=3, launcher=EMBEDDED)
]
MOUNTS = """/dev/vda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/ada/ram\\040disk tmpfs rw 0 0
"""


def ask(monkeypatch: pytest.MonkeyPatch, config: str = "ClusterName = c\n", **system: Any) -> tuple[str, ...]:
    """Check the runs on a fake cluster whose partition has two nodes and allows an hour."""

    def fake(*argv: str, **options: Any) -> CompletedProcess[str]:
        if argv[0] == "sinfo":
            return CompletedProcess((), 0, "main|1:00:00|1-infinite\n", "")
        return CompletedProcess((), 0, "PartitionName=main TotalNodes=2\n" if argv[-1] == "partition" else config, "")

    monkeypatch.setattr(limits, "run_command", fake)
    return limits.check_limits(slurm_system(**system), RUNS)


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
        ("ClusterName = c\n", {"extra_sbatch_args": ["--exclusive --partition 'big'"]}),
        ("", {}),
    ],
    ids=[
        "a plugin may change the job",
        "another partition",
        "a prefix",
        "the values themselves",
        "quoted",
        "no answer",
    ],
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
        ("a|1-02:00:00|1-8", (93600.0, 8.0)),
        ("a|infinite|1-infinite", (math.inf, math.inf)),
        ("a|n/a|4", (math.inf, 4.0)),
        ("a", (math.inf, math.inf)),
    ],
)
def test_partitions_of_sinfo(row: str, expected: tuple[float, float]) -> None:
    assert limits.parse_partitions(f"{row}\n\n") == {"a": expected}


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


def ask_accounting(
    monkeypatch: pytest.MonkeyPatch, *, user: str, qos: str = "", partition: str = "", **system: Any
) -> str:
    """Return the line of the account on a fake cluster with accounting."""
    answers = {
        "config": "ClusterName = c\nAccountingStorageEnforce = associations,limits,qos\n",
        "partition": f"PartitionName=main TotalNodes=9 {partition}\n",
        "sinfo": "main|infinite|1-infinite\n",
        "user": user,
        "qos": f"normal||||\ngold|Relative|0-00:30:00|node=1|\n{qos}",
    }

    def fake(*argv: str, **options: Any) -> CompletedProcess[str]:
        kind = argv[argv.index("show") + 1] if argv[0] == "sacctmgr" else argv[0] if argv[0] == "sinfo" else argv[-1]
        return CompletedProcess((), 0, answers[kind], "")

    monkeypatch.setattr(limits, "run_command", fake)
    monkeypatch.setattr("os.getuid", lambda: 0)
    return limits.check_limits(slurm_system(**system), [_SHORT])[0]


_SHORT: Any = SimpleNamespace(test_id="t", time_limit="5", time_limit_s=300.0, num_nodes=2, launcher=EMBEDDED)
_USER = "None|c|lab|lab||normal||||\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"user": _USER}, "account: lab"),
        ({"user": _USER, "partition": "AllowAccounts=top"}, "account: not evaluated: partition main lists other"),
        ({"user": _USER, "extra_sbatch_args": ["--qos=a,b"]}, "account: not evaluated: Slurm chooses one of"),
        ({"user": _USER, "extra_sbatch_args": ["--qos 'gold'"]}, "account: lab, QOS gold"),
        ({"user": "None|c|lab|lab|MAIN|normal||||\n"}, "account: lab"),
    ],
    ids=["plain", "accounts below an allowed one", "several QOS", "a QOS that root may use", "case of a partition"],
)
def test_what_slurm_accepts_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], line: str
) -> None:
    assert ask_accounting(monkeypatch, **arguments).startswith(line)


# Partitions and GPUs as sinfo writes them

SINFO = """\
batch*|4:00:00|2|login[1-2]|(null)
batch*|4:00:00|128|h100-[001-128]|gpu:h100:8(S:0-1)
small|30:00|1|a1|gpu:2
empty|infinite|0||(null)
long|infinite|4|x[1-2],y[1-2]|shard:8,gpu:nvidia_h100_80gb_hbm3:4(S:0,2),gpu:tiny:1
mig|2-00:00:00|1|m1|gpu:1g.10gb:7,license:1
"""


def test_the_lines_of_sinfo() -> None:
    found = [(n.partition, n.is_default, n.time_limit_s, n.num_nodes, n.gpus, n.gpu_type) for n in parse_nodes(SINFO)]
    assert found == [
        ("batch", True, 14400, 2, 0, None),
        ("batch", True, 14400, 128, 8, "h100"),
        ("small", False, 1800, 1, 2, None),
        ("long", False, None, 4, 5, None),
        ("mig", False, 172800, 1, 7, "1g.10gb"),
    ]


@pytest.mark.parametrize(("name", "names"), [(None, "h100-[001-128]"), ("small", "a1")])
def test_a_partition_of_several_kinds(monkeypatch: pytest.MonkeyPatch, name: str | None, names: str) -> None:
    monkeypatch.setattr(partitions, "run_command", lambda *argv: CompletedProcess((), 0, SINFO, ""))
    assert find_nodes(name).names == names


@pytest.mark.parametrize("name", ["larg", None])
def test_a_partition_that_is_not_there(monkeypatch: pytest.MonkeyPatch, sentence: Sentence, name: str | None) -> None:
    monkeypatch.setattr(partitions, "run_command", lambda *argv: CompletedProcess((), 0, SINFO.replace("*", ""), ""))
    with pytest.raises(BadInput) as caught:
        find_nodes(name)
    sentence(caught)
