"""What Slurm refuses, or would keep waiting for ever, is one clear failure per point in Slurm's own words.

Limits on the number of jobs are not refusals: they pass.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.verdict.triage import load_states

pytestmark = pytest.mark.slurm

STRICT = "AccountingStorageEnforce=associations,limits,qos\nEnforcePartLimits=ALL"
LENIENT = "EnforcePartLimits=NO\nMaxArraySize=4\nPartitionName=other Nodes=ALL\nPartitionName=dark Nodes=ALL Hidden=YES"


@pytest.fixture(scope="module")
def strict(new_cluster: Callable[..., Any]) -> Any:
    """A cluster that knows its users and refuses at submission what its partitions do not allow."""
    sandbox = new_cluster(accounting=True, extra_conf=STRICT)
    sandbox.run("sacctmgr", "-i", "add", "account", "lab")
    sandbox.run("sacctmgr", "-i", "add", "user", "root", "account=lab")
    sandbox.run("scontrol", "update", "PartitionName=main", "MaxTime=60")
    return sandbox


@pytest.fixture(scope="module")
def lenient(new_cluster: Callable[..., Any]) -> Any:
    """A cluster that takes nearly everything."""
    sandbox = new_cluster(extra_conf=LENIENT)
    sandbox.run("scontrol", "update", "PartitionName=main", "MaxTime=60")
    return sandbox


REFUSED = {state.id for state in load_states() if state.state == "REFUSED"}


def check_refused(point: dict[str, Any], words: str) -> None:
    assert (point["verdict"], point["job"]["state"]) == ("failed", "REFUSED"), point["reasons"]
    assert point["failure"]["id"] in REFUSED
    assert not any("could not be measured" in reason or "in the log" in reason for reason in point["reasons"])
    assert len(point["attempts"]) == 1
    assert any(words in reason for reason in point["reasons"]), point["reasons"]


def after(first: str, minutes: str) -> str:
    """Return the keys of a test that begins when another has ended."""
    return f'time_limit = "{minutes}"\ndependencies = [{{ type = "start_post_comp", id = "{first}" }}]'


# what a test asks for -> Slurm's words
ASKED = {
    "no_such_node": ({"run": 'nodes = ["nowhere-1"]'}, "Invalid node name specified"),
    "no_such_node_to_exclude": ({"run": 'exclude_nodes = ["nowhere-2"]'}, "Invalid node name specified"),
    "too_many_gpus": ({"num_gpus": 8}, "Requested node configuration is not available"),
}


def test_what_a_test_asks_for_is_refused_and_the_others_run(
    strict: Any, start_run: Any, stand_in_test: Any, nothing_left: Any
) -> None:
    asked = [stand_in_test(id_, **{"run": 'time_limit = "5"', **options}) for id_, (options, _) in ASKED.items()]
    fine = [stand_in_test(f"fine{number}", run='time_limit = "5"') for number in range(3)]
    run = start_run(strict, [fine[0], *asked, *fine[1:]], gpus_per_node=8).finish(1)
    for id_, (_, words) in ASKED.items():
        check_refused(run.point(id_), words)
        assert run.point(id_)["job"]["job_id"] is None
        assert words in run.words
        assert words in run.report_text
    for number in range(3):
        assert run.point(f"fine{number}")["verdict"] == "success"
    nothing_left(strict)


# option of the system -> Slurm's words
OPTIONS = {
    "--constraint=moon": "Invalid feature specification",
    "--mem=999G": "Memory specification can not be satisfied",
    "--reservation=nobodys": "Requested reservation is invalid",
    "--licenses=matlab:1": "Invalid license specification",
    "--gres=tpu:1": "Invalid generic resource (gres) specification",
    "--begin=whenever": "Invalid --begin specification",
    "--time=soon": "Invalid --time specification",
    "--dependency=afterok:x": "Job dependency problem",
    "--no-such-option": "unrecognized option",
}


def test_what_the_system_asks_for_is_refused_for_every_point(
    strict: Any, start_run: Any, stand_in_test: Any, nothing_left: Any
) -> None:
    tests = [stand_in_test("single", run='time_limit = "5"'), *(stand_in_test(f"task{n}") for n in range(2))]
    runs = {option: start_run(strict, tests, system=f'extra_sbatch_args = ["{option}"]') for option in OPTIONS}
    for option, words in OPTIONS.items():
        run = runs[option].finish(1)
        points = run.points()
        assert len(points) == 3
        for point in points.values():
            check_refused(point, words)
        assert run.stdout.count("REFUSED") >= 3, "one line each"
    nothing_left(strict)


@pytest.mark.parametrize("flags", ["DenyOnLimit", "-1"], ids=["refused", "kept waiting"])
def test_a_limit_of_the_qos_on_a_jobs_size_is_a_refusal(
    strict: Any, start_run: Any, stand_in_test: Any, flags: str, tmp_path: Path
) -> None:
    """One that came after the run had begun: an earlier one is refused before anything is submitted."""
    first = stand_in_test("short", {"at": 1, "wait_for": str(tmp_path / "go")}, run='time_limit = "5"')
    run = start_run(strict, [first, stand_in_test("long", run=after("short", "30"))])
    run.wait_for_step("short")
    strict.run("sacctmgr", "-i", "modify", "qos", "normal", "set", f"flags={flags}", "maxwall=00:10:00")
    try:
        (tmp_path / "go").touch()
        run.finish(1, timeout_s=60)
    finally:
        strict.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "maxwall=-1")
    assert run.point("short")["verdict"] == "success"
    check_refused(run.point("long"), "QOSMaxWallDurationPerJobLimit")


def test_a_limit_on_submitted_jobs_is_waited_out(
    strict: Any, start_run: Any, stand_in_test: Any, nothing_left: Any
) -> None:
    strict.run("sacctmgr", "-i", "modify", "user", "root", "set", "maxsubmitjobs=2")
    try:
        run = start_run(strict, [stand_in_test(f"t{number}") for number in range(5)]).finish(timeout_s=90)
    finally:
        strict.run("sacctmgr", "-i", "modify", "user", "root", "set", "maxsubmitjobs=-1")
    assert run.returncode == 0, run.words
    assert {point["verdict"] for point in run.points().values()} == {"success"}
    assert all(len(point["attempts"]) == 1 for point in run.points().values())
    assert "submitting again later" in run.words
    nothing_left(strict)


def test_what_would_wait_for_ever_ends_in_seconds(
    lenient: Any, start_run: Any, stand_in_test: Any, nothing_left: Any, tmp_path: Path
) -> None:
    """A limit that was lowered after the run had begun; what no check before it looks at: nodes that are excluded."""
    tests = [
        stand_in_test("first", {"at": 1, "wait_for": str(tmp_path / "go")}, run='time_limit = "5"'),
        stand_in_test("too_long", run=after("first", "50")),
        stand_in_test("too_many_nodes", num_nodes=2, run='exclude_nodes = ["gb200-1"]\n' + after("first", "5")),
        *(stand_in_test(f"fine{number}", run=after("first", "5")) for number in range(2)),
    ]
    run = start_run(lenient, tests)
    run.wait_for_step("first")
    lenient.run("scontrol", "update", "PartitionName=main", "MaxTime=30")
    try:
        (tmp_path / "go").touch()
        run.finish(1, timeout_s=60)
    finally:
        lenient.run("scontrol", "update", "PartitionName=main", "MaxTime=60")
    check_refused(run.point("too_long"), "the scheduler will never start it: PartitionTimeLimit")
    check_refused(run.point("too_many_nodes"), "Requested node configuration is not available")
    assert run.point("too_long")["job"]["job_id"] is not None
    assert all(run.point(f"fine{number}")["verdict"] == "success" for number in range(2))
    nothing_left(lenient)


def test_more_points_than_an_array_may_hold(
    lenient: Any, start_run: Any, stand_in_test: Any, nothing_left: Any
) -> None:
    run = start_run(lenient, [stand_in_test(f"t{number}", run='time_limit = "5"') for number in range(6)]).finish(0)
    ids = [run.point(f"t{number}")["job"]["job_id"] for number in range(6)]
    assert sum("_" in id_ for id_ in ids) == 4, "MaxArraySize=4 allows the indices 0 to 3"
    assert {point["verdict"] for point in run.points().values()} == {"success"}
    nothing_left(lenient)


def test_no_such_partition(lenient: Any, start_run: Any, stand_in_test: Any) -> None:
    run = start_run(lenient, [stand_in_test("t")], partition="nowhere").finish(2)
    assert "Slurm has no partition 'nowhere'; use one of dark, main, other" in run.words
    assert not list((run.directory / "out").glob("*")), "nothing is written"


SECOND = after("first", "5")


def test_a_partition_that_closes_in_between(
    lenient: Any, start_run: Any, stand_in_test: Any, nothing_left: Any, until: Any, tmp_path: Path
) -> None:
    """A partition that is down is waited for, since somebody has taken it down; an inactive or deleted one refuses."""
    first = stand_in_test("first", {"at": 1, "wait_for": str(tmp_path / "go")})
    tests = [first, stand_in_test("second", run=SECOND)]
    gone = start_run(lenient, tests, partition="other")
    down = start_run(lenient, tests)
    down.wait_for_step("first")
    lenient.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    gone.wait_for_step("first")
    gone.send(signal.SIGSTOP)
    (tmp_path / "go").touch()
    until("the end of first", lambda: not lenient.run("squeue", "--noheader", "--partition=other").stdout.strip())
    lenient.run("scontrol", "delete", "PartitionName=other")
    gone.send(signal.SIGCONT)
    gone.finish(1)
    assert gone.point("first")["verdict"] == "success"
    check_refused(gone.point("second"), "invalid partition specified: other")
    waiting = down.job("second")
    until(
        "it to wait", lambda: "PartitionDown" in lenient.run("squeue", "--jobs", waiting, "--Format=Reason:40").stdout
    )
    lenient.run("scontrol", "update", "PartitionName=main", "State=UP")
    down.finish(0)
    nothing_left(lenient)

    lenient.run("scontrol", "update", "PartitionName=main", "State=INACTIVE")
    try:
        inactive = start_run(lenient, [stand_in_test("t", run='time_limit = "5"')]).finish(1)
    finally:
        lenient.run("scontrol", "update", "PartitionName=main", "State=UP")
    check_refused(inactive.point("t"), "Required partition not available (inactive or drain)")
    nothing_left(lenient)


@pytest.mark.drill
def test_a_queue_that_is_too_small_for_the_array(new_cluster: Any, start_run: Any, stand_in_test: Any) -> None:
    sandbox = new_cluster(extra_conf="MaxJobCount=4\nMinJobAge=2")
    run = start_run(sandbox, [stand_in_test(f"t{number}") for number in range(5)]).finish(timeout_s=400)
    assert run.returncode == 0, run.words


def test_a_hidden_partition_is_one_like_any_other(
    lenient: Any, start_run: Any, stand_in_test: Any, nothing_left: Any
) -> None:
    """Its jobs and nodes are seen; root, who runs the sandbox, would see them without being asked for all, too."""
    fine = stand_in_test("fine", {"step_s": 0.5})
    run = start_run(lenient, [fine], partition="dark").finish(0)
    assert run.point("fine")["verdict"] == "success"
    refused = start_run(lenient, [fine, stand_in_test("too_many_nodes", num_nodes=8)], partition="dark").finish(2)
    assert "num_nodes: 8 is more than partition dark has (2)" in refused.words
    nothing_left(lenient)
