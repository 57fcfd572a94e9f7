"""Limits of the cluster are judged before anything is submitted: a run that exceeds one leaves no file and no job."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence

pytestmark = pytest.mark.slurm

ENFORCED = "AccountingStorageEnforce=associations,limits,qos\nPartitionName=other Nodes=gb200-1 MaxTime=10"
SHORT, LONG = 'time_limit = "5"', 'time_limit = "2:00:00"'


@pytest.fixture(scope="module")
def known(new_cluster: Callable[..., Any]) -> Any:
    """A cluster that knows its users: root with the accounts root and lab."""
    sandbox = new_cluster(accounting=True, extra_conf=ENFORCED)
    sandbox.run("sacctmgr", "-i", "add", "account", "lab")
    sandbox.run("sacctmgr", "-i", "add", "user", "root", "account=lab")
    sandbox.run("sacctmgr", "-i", "modify", "account", "lab", "set", "maxwall=0:20:00", "maxtres=node=1")
    sandbox.run("sacctmgr", "-i", "add", "qos", "free")
    sandbox.run("sacctmgr", "-i", "modify", "qos", "free", "set", "flags=PartitionTimeLimit", "maxwall=3:00:00")
    sandbox.run("sacctmgr", "-i", "modify", "user", "root", "where", "account=root", "set", "qos=normal,free")
    sandbox.run("scontrol", "update", "PartitionName=main", "MaxTime=60")
    return sandbox


@pytest.fixture(scope="module")
def plain(new_cluster: Callable[..., Any]) -> Any:
    """A cluster without accounting, as `make slurm-sandbox` starts."""
    sandbox = new_cluster()
    sandbox.run("scontrol", "update", "PartitionName=main", "MaxTime=60")
    return sandbox


# what a test and a system ask for -> what is asked, what is allowed
EXCEEDED: dict[str, tuple[dict[str, Any], str, str]] = {
    "partition's time": (
        {"run": LONG},
        "",
        "test 't': time_limit: 02:00:00 is more than partition main allows (01:00:00)",
    ),
    "no time limit": (
        {"run": 'time_limit = "0"'},
        "",
        "time_limit: no limit is more than partition main allows (01:00:00)",
    ),
    "partition's nodes": ({"num_nodes": 4}, "", "test 't': num_nodes: 4 is more than partition main has (2)"),
    "account's time": ({"run": 'time_limit = "30"'}, 'account = "lab"', "is more than account lab allows (00:20:00)"),
    "account's nodes": ({"num_nodes": 2}, 'account = "lab"', "num_nodes: 2 is more than account lab allows (1)"),
    "account": ({}, 'account = "nobody"', "account: 'nobody' is not an account of root; use one of lab, root"),
    "qos": ({}, 'extra_sbatch_args = ["--qos=gold"]', "QOS 'gold' is not open to root with account root; use one of"),
    "qos's time": (
        {"run": 'time_limit = "4:00:00"'},
        'extra_sbatch_args = ["--qos=free"]',
        "time_limit: 04:00:00 is more than QOS free allows (03:00:00)",
    ),
}


@pytest.mark.parametrize(("test", "system", "words"), EXCEEDED.values(), ids=EXCEEDED)
def test_nothing_is_submitted_beyond_a_limit(
    known: Any, start_run: Any, stand_in_test: Any, test: dict[str, Any], system: str, words: str
) -> None:
    run = start_run(known, [stand_in_test("fine"), stand_in_test("t", **test)], system=system).finish(2)
    assert words in run.stderr
    assert not list((run.directory / "out").glob("*")), "nothing is written"
    assert not known.run("squeue", "--noheader").stdout


@pytest.mark.parametrize("key", ["DenyAccounts=root", "MaxNodes=1"])
def test_a_partition_that_is_closed_to_the_job(
    known: Any, start_run: Any, stand_in_test: Any, sentence: Sentence, key: str
) -> None:
    known.run("scontrol", "update", "PartitionName=main", key)
    try:
        run = start_run(known, [stand_in_test("t", num_nodes=2)]).finish(2)
    finally:
        known.run("scontrol", "update", "PartitionName=main", "DenyAccounts=", "MaxNodes=UNLIMITED")
    sentence(run.stderr)


def test_every_limit_has_a_line_and_a_run_within_them_starts(known: Any, start_run: Any, stand_in_test: Any) -> None:
    """The results are below /tmp, which the sandbox's nodes share and others would not: a warning, no refusal."""
    run = start_run(known, [stand_in_test("t", run=SHORT)], system='account = "lab"').finish(0)
    lines = run.stdout.splitlines()
    assert "account: lab, QOS normal" in lines
    assert "time limit: 00:05:00 of 00:20:00 (account lab)" in lines
    assert "nodes: 1 of 1 (account lab)" in lines
    assert any(line.startswith("output path: warning: ") for line in lines)


def test_a_qos_may_lift_a_partitions_limit(known: Any, start_run: Any, stand_in_test: Any) -> None:
    run = start_run(known, [stand_in_test("t", run=LONG)], system='extra_sbatch_args = ["--qos=free"]').finish(0)
    assert "time limit: 02:00:00 of 03:00:00 (QOS free)" in run.stdout.splitlines()


def test_the_most_generous_of_several_partitions_counts(known: Any, start_run: Any, stand_in_test: Any) -> None:
    run = start_run(known, [stand_in_test("t", run='time_limit = "30"', num_nodes=2)], partition="other,main").finish(0)
    assert "nodes: 2 of 2 (partition other,main)" in run.stdout.splitlines()


def test_without_accounting_the_account_is_not_evaluated(
    plain: Any, start_run: Any, stand_in_test: Any, sentence: Sentence
) -> None:
    run = start_run(plain, [stand_in_test("t", run=SHORT)], system='account = "nobody"').finish(0)
    assert "account: not evaluated: Slurm enforces none" in run.stdout.splitlines()
    refused = start_run(plain, [stand_in_test("t", run=LONG)]).finish(2)
    sentence(refused.stderr)


@pytest.mark.parametrize(
    ("sacctmgr", "reason"),
    [("", "sacctmgr is not installed here"), ("#!/bin/sh\necho down >&2; exit 1", "sacctmgr failed: down")],
    ids=["absent", "fails"],
)
def test_without_an_answer_of_the_accounting_nothing_is_refused(
    known: Any, start_run: Any, stand_in_test: Any, tmp_path: Path, sacctmgr: str, reason: str
) -> None:
    """A QOS may lift the partition's limit: Slurm decides, and here it waits for ever, which ends the point."""
    place = tmp_path / "first on the path"
    place.mkdir()
    for name in os.listdir("/usr/bin"):
        (place / name).symlink_to(f"/usr/bin/{name}")
    (place / "sacctmgr").unlink()
    if sacctmgr:
        (place / "sacctmgr").write_text(sacctmgr)
        (place / "sacctmgr").chmod(0o755)
    tests = [stand_in_test("fine", run=SHORT), stand_in_test("t", run=LONG)]
    run = start_run(known, tests, env={"PATH": str(place)}).finish(1)
    assert f"account: not evaluated: {reason}" in run.stdout
    assert "time limit: not evaluated: a QOS may lift the limit of partition main, which is exceeded" in run.stdout
    assert {key.partition("/")[0]: point["verdict"] for key, point in run.points().items()} == {
        "fine": "success",
        "t": "failed",
    }
