"""Files that others see seconds after the scheduler has reported the end of their job, and logs with srun's labels."""

import re
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

NODES = 12


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=NODES)


@pytest.fixture(scope="module")
def late(sandbox: Any, start_shared_run: Any, stand_in_test: Any) -> Any:
    """Runs, all under way, of which every job hides what it writes: for 4 and 20 s after its end, and for ever."""
    tests = [
        stand_in_test("four", {"late_s": 4}),
        stand_in_test("twenty", {"late_s": 20}),
        stand_in_test("many", {"late_s": 4}, args="gb = 8\nmb = [1, 2]"),
        stand_in_test("fails", {"late_s": 4, "at": 2, "exit": 3}),
    ]
    some = start_shared_run(sandbox, tests, runner="retries = 1")
    never = start_shared_run(sandbox, [stand_in_test("never", {"late_s": None})], runner="late_files_s = 2")
    return some, never


def test_files_that_come_late_are_waited_for(late: Any) -> None:
    run, _ = late
    run.finish(1)
    verdicts = {key.partition("/")[0]: point["verdict"] for key, point in run.points().items()}
    assert verdicts == {"four": "success", "twenty": "success", "many": "success", "fails": "failed"}
    assert [len(point["steps"]) for point in run.points().values()] == [5, 5, 5, 5, 2]
    assert "exit code 3" in " ".join(run.point("fails")["reasons"])
    attempts = run.query("SELECT key FROM attempts")
    assert len(attempts) == 5, "nothing is submitted again"
    assert [key for (key,) in attempts if len((run.root / key / "started.txt").read_text().splitlines()) != 1] == []
    waits = re.findall(r"(\w+)/\S+: job \S+ has ended, and (.+?); waiting for its files for up to 60 s", run.words)
    assert sorted(waits) == [
        ("fails", "its start mark is missing"),
        ("four", "0 of 5 steps are in the log; the first missing is 1"),
        *[("many", "0 of 5 steps are in the log; the first missing is 1")] * 2,
        ("twenty", "0 of 5 steps are in the log; the first missing is 1"),
    ]


def test_a_log_that_never_comes_is_a_failure(late: Any) -> None:
    _, run = late
    run.finish(1)
    assert "waiting for its files for up to 2 s" in run.words
    assert run.point("never")["verdict"] == "failed"
    assert "0 of 5 steps are in the log" in " ".join(run.point("never")["reasons"])


def test_labels_of_srun_on_twelve_nodes(sandbox: Any, start_run: Any, stand_in_test: Any) -> None:
    """Labels are as wide as the highest rank's."""
    test = stand_in_test("wide", {"says_s": 0.25}, num_nodes=NODES, args="gb = 12", run='extra_srun_args = "--label"')
    run = start_run(sandbox, [test]).finish(0)
    point = run.point("wide")
    assert re.match(r" ?0?0: MBRIDGE_RUN ", run.log("wide")), run.log("wide")[:80]
    assert point["metrics"]["step_time_s"]["mean"] == 0.25
    assert [step["step"] for step in point["steps"]] == [1, 2, 3, 4, 5]
