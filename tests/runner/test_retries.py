"""What the infrastructure has failed is tried again, elsewhere, within limits; what hangs or can never run is ended."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.runner import watch
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus, SubmitRefused
from tests.golden import Sentence
from tests.runner.conftest import COMPLETED, PENDING, RUNNING

NODE_FAIL = JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, nodes="n[1-2]", run_time_s=60.0)
FORGOTTEN = JobStatus("FORGOTTEN", JobClass.UNKNOWN, reason="Slurm no longer knows the job")
NEVER_STARTED = JobStatus("NEVER_STARTED", JobClass.UNKNOWN, reason="it has never started")


def _pending(reason: str, hopeless: JobClass | None = None) -> JobStatus:
    return JobStatus("PENDING", JobClass.ACTIVE, reason=reason, hopeless=hopeless)


def _record(step: int) -> str:
    values = f'"step": {step}, "step_time_s": 0.5, "tflops_per_gpu": 1.0, "losses": {{"lm loss": 5.0}}'
    return f'MBRIDGE_STEP {{"version": 1, {values}}}\n'


# Retries


def test_what_the_infrastructure_failed_gets_a_fresh_attempt(bench: Any) -> None:
    bench.script(a=[[RUNNING, NODE_FAIL], [RUNNING, COMPLETED]])
    notes = bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["NODE_FAIL", "COMPLETED"]}
    assert bench.verdicts() == {"a/0/0": "success"}
    first, second = bench.entries()["a/0/0"].attempts
    assert (first.failure, second.failure) == ("node_fail", "")
    assert (first.job_id, second.job_id) == ("100", "101")
    assert first.token != second.token
    assert any("a/0/0: attempt 1 failed: node_fail" in notice for notice in notes.notices)


def test_the_files_of_an_attempt_are_put_aside(bench: Any) -> None:
    submit, seen = bench.scheduler.submit, []

    def write(submission: Any, root: Any) -> Any:
        (directory,) = [root / run.key for run in submission.runs]
        seen.append(sorted(path.name for path in directory.iterdir() if not path.is_symlink()))  # claims
        (directory / "stdout.txt").write_text(f"attempt {len(seen)}")
        return submit(submission, root)

    bench.scheduler.submit = write
    bench.script(a=[[NODE_FAIL], [NODE_FAIL], [COMPLETED]])
    bench.drive(bench.run("a"))
    assert seen == [[], ["attempt-1"], ["attempt-1", "attempt-2"]]
    texts = [(bench.root / "a/0/0" / name / "stdout.txt").read_text() for name in ("attempt-1", "attempt-2", ".")]
    assert texts == ["attempt 1", "attempt 2", "attempt 3"]


@pytest.mark.parametrize("retries", [0, 1, 2, 3])
def test_there_are_so_many_retries(bench: Any, retries: int) -> None:
    bench.script(a=[NODE_FAIL])
    bench.drive(bench.run("a"), retries=retries)
    assert bench.states() == {"a/0/0": ["NODE_FAIL"] * (1 + retries)}
    assert bench.verdicts() == {"a/0/0": "failed"}


def test_every_retry_waits_longer(bench: Any) -> None:
    times: list[float] = []
    submit = bench.scheduler.submit
    bench.scheduler.submit = lambda *args: (times.append(bench.clock.now), submit(*args))[1]
    bench.script(a=[NODE_FAIL])
    bench.drive(bench.run("a"), retries=3)
    waits = [after - before for before, after in pairwise(times)]
    assert waits == sorted(waits)
    assert waits[-1] > 3 * waits[0] > 0


@pytest.mark.parametrize(
    "end",
    [
        JobStatus("FAILED", JobClass.FAILED, exit_code=1),
        JobStatus("TIMEOUT", JobClass.FAILED),
        JobStatus("CANCELLED", JobClass.CANCELLED, signal=15),
    ],
    ids=lambda status: str(status.state),
)
def test_anything_else_is_not_tried_again(bench: Any, end: JobStatus) -> None:
    """The application would fail again, and what somebody has cancelled is not wanted back."""
    bench.script(a=[RUNNING, end])
    bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": [end.state]}
    assert bench.excluded() == {}


def test_the_sick_nodes_of_the_job_are_excluded(bench: Any) -> None:
    bench.script(a=[[NODE_FAIL], [COMPLETED]], b=[RUNNING] * 5 + [COMPLETED])
    bench.scheduler.unhealthy = {"n[1-2]": "", "n9": "down"}
    bench.scheduler.unhealthy_nodes = lambda nodes: {"n2": "down* (Not responding)"} if nodes == "n[1-2]" else {}
    bench.drive(bench.run("a"), bench.run("b"))
    ((node, reason),) = bench.excluded().items()
    assert node == "n2"
    assert "down* (Not responding)" in reason
    assert "a/0/0" in reason
    assert [submission.exclude_nodes for submission in bench.scheduler.submissions] == [(), (), ("n2",)]


def test_the_nodes_that_the_evidence_names_are_excluded(bench: Any) -> None:
    """A log may say anything: only nodes of the job count."""
    bad = JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, reason="node gb200-[07-08],login.site", nodes="gb200-[06-09]")
    bench.script(a=[[bad], [COMPLETED]])
    bench.drive(bench.run("a"))
    assert list(bench.excluded()) == ["gb200-07", "gb200-08"]
    assert bench.scheduler.submissions[1].exclude_nodes == ("gb200-07", "gb200-08")


def test_nodes_that_nobody_can_tell_are_not_excluded(bench: Any) -> None:
    def fail(nodes: str) -> dict[str, str]:
        raise ToolFailure("sinfo did not respond within 60 s")

    bench.scheduler.unhealthy_nodes = fail
    bench.script(a=[[NODE_FAIL], [COMPLETED]])
    notes = bench.drive(bench.run("a"))
    assert bench.verdicts() == {"a/0/0": "success"}
    assert bench.excluded() == {}
    assert any("sinfo did not respond" in notice for notice in notes.notices)


def test_without_enough_nodes_it_is_not_tried_again(bench: Any) -> None:
    bench.scheduler.unhealthy_nodes = lambda nodes: {"n1": "down"}
    bench.scheduler.usable = 2
    bench.script(a=[NODE_FAIL])
    notes = bench.drive(bench.run("a", num_nodes=2), bench.run("b", num_nodes=2), max_parallel=1)
    assert bench.states() == {"a/0/0": ["NODE_FAIL"], "b/0/0": []}
    assert bench.verdicts() == {"a/0/0": "failed", "b/0/0": "skipped"}
    assert any("not retried: 1 node is left of the 2 it needs" in notice for notice in notes.notices)


@pytest.mark.parametrize("nodes", [("n1", "n2"), ("n[1-2]",)])
def test_a_run_that_needs_an_excluded_node_is_skipped(bench: Any, nodes: tuple[str, ...]) -> None:
    """Or Slurm refuses it, or lets it wait for ever: it may not both use and exclude a node."""
    bench.scheduler.unhealthy_nodes = lambda nodes: {"n2": "down"}
    bench.script(a=[[NODE_FAIL], [COMPLETED]])
    bench.drive(bench.run("a"), bench.run("b", nodes=nodes), max_parallel=1)
    entry = bench.entries()["b/0/0"]
    assert (entry.verdict, "n2" in entry.reasons[0]) == ("skipped", True)


def _not_started(node: str) -> JobStatus:
    return JobStatus("LAUNCH_FAILED", JobClass.INFRASTRUCTURE, nodes=node, reason=f"suspect {node}")


def test_a_node_that_cannot_start_a_job_is_excluded(bench: Any) -> None:
    """Jobs fail there within a second: it would be given most of a sweep."""
    bench.scheduler.usable = 4
    bench.script(a=[[_not_started("n2")], [COMPLETED]])
    bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert bench.excluded() == {"n2": "launch_failed in a/0/0"}
    assert [submission.exclude_nodes for submission in bench.scheduler.submissions[1:]] == [("n2",), ("n2",)]


def test_where_no_node_can_start_a_job_the_last_ones_are_tried_again(bench: Any) -> None:
    bench.scheduler.usable = 2
    bench.script(a=[[_not_started("n1")], [_not_started("n2")], [COMPLETED]])
    bench.drive(bench.run("a"), bench.run("b", nodes=("n2",)), max_parallel=1)
    assert bench.verdicts() == {"a/0/0": "success", "b/0/0": "success"}
    assert bench.excluded() == {}, "n1 is no worse than n2"


def test_a_program_that_an_image_lacks_is_no_nodes_failure(bench: Any) -> None:
    bench.scheduler.usable = 4
    bench.script(a=[replace(_not_started("n2"), state="PROGRAM_MISSING")])
    notes = bench.drive(bench.run("a", container_image="image"))
    assert bench.states() == {"a/0/0": ["PROGRAM_MISSING"]}
    assert bench.excluded() == {}
    assert any("not retried: the image is the same on other nodes" in notice for notice in notes.notices)


def _lacks(node: str) -> JobStatus:
    """The job's container could not be set up there, which the catalogue takes for the application's failure."""
    return JobStatus("FAILED", JobClass.FAILED, exit_code=1, nodes=node, reason=f"suspect {node}", run_time_s=1.0)


def test_what_could_not_start_on_a_node_is_tried_on_another(bench: Any) -> None:
    bench.scheduler.usable = 2
    bench.script(a=[[_lacks("n2")], [COMPLETED]])
    bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert bench.verdicts() == {"a/0/0": "success", "b/0/0": "success"}
    assert bench.excluded() == {"n2": "failed in a/0/0"}
    assert [submission.exclude_nodes for submission in bench.scheduler.submissions] == [(), ("n2",), ("n2",)]


def test_a_failure_of_every_node_is_none_of_theirs(bench: Any) -> None:
    bench.scheduler.usable = 2
    bench.script(a=[[_lacks("n1")], [_lacks("n2")], [COMPLETED]])
    notes = bench.drive(bench.run("a"), bench.run("a", 1), bench.run("b", num_nodes=2), max_parallel=1, retries=5)
    assert bench.states() == {**dict.fromkeys(("a/0/0", "a/1/0"), ["FAILED"] * 2), "b/0/0": ["COMPLETED"]}
    assert bench.excluded() == {}
    assert any("not retried: failed was the same on every node tried: n1, n2" in n for n in notes.notices)


def test_a_suspicion_costs_a_larger_run_no_node(bench: Any) -> None:
    """The smaller run avoids the node, until it has run elsewhere and no run needs the node any more."""
    bench.scheduler.usable = 2
    bench.script(a=[[_lacks("n2")], [COMPLETED]])
    bench.drive(bench.run("a"), bench.run("b", num_nodes=2), max_parallel=1)
    assert bench.verdicts() == {"a/0/0": "success", "b/0/0": "success"}
    assert dict(zip(bench.tests("submit"), [s.exclude_nodes for s in bench.scheduler.submissions], strict=True)) == {
        "a": ("n2",),
        "b": (),
    }
    assert bench.excluded() in ({}, {"n2": "failed in a/0/0, which ran elsewhere"})


def test_of_many_nodes_a_few_show_that_it_is_not_theirs(bench: Any) -> None:
    """A mount that no node has costs a sweep neither a hundred nodes nor hundreds of jobs."""
    bench.scheduler.usable = 100
    nodes = iter(range(1000))
    bench.script(a=[PENDING])
    bench.scheduler.start = lambda submission, seen_at=0.0: start(submission, next(nodes))
    real = type(bench.scheduler).start

    def start(submission: Any, node: int) -> dict[str, str]:
        bench.scheduler.script["a"] = [_lacks(f"n{node}")]
        return real(bench.scheduler, submission)

    bench.drive(*(bench.run("a", point) for point in range(30)), max_parallel=1)
    assert set(bench.verdicts().values()) == {"failed"}
    assert len(bench.scheduler.submissions) < 50
    assert bench.excluded() == {}


@pytest.mark.parametrize("keys", [{"nodes": ("n2",)}, {"num_nodes": 2}])
def test_what_cannot_go_elsewhere_is_not_tried_again(bench: Any, keys: dict[str, Any]) -> None:
    bench.scheduler.usable = 2
    bench.script(a=[_lacks("n2")])
    bench.drive(bench.run("a", **keys))
    assert bench.states() == {"a/0/0": ["FAILED"]}
    assert bench.excluded() == {}


# Hangs


def _hanging(bench: Any, write: Any, end: JobStatus | None = None, looks: int = 10**6) -> None:
    """Drive a run that may go 600 s without a step; `write(seconds since the start, log)` is called at every look."""
    run = bench.run("a", hang_timeout_s=600.0)
    poll, log = bench.scheduler.poll, bench.root / run.key / "stdout.txt"
    started = bench.clock.now

    def look(jobs: Any) -> Any:
        write(bench.clock.now - started, log)
        return poll(jobs)

    bench.scheduler.poll = look
    bench.script(a=[RUNNING] * min(looks, 5000) + [end or COMPLETED])
    bench.drive(run)


def test_a_run_without_a_step_hangs(bench: Any, sentence: Sentence) -> None:
    _hanging(bench, lambda seconds, log: None)
    (attempt,) = bench.entries()["a/0/0"].attempts
    assert (attempt.status.state, attempt.status.job_class) == ("HUNG", JobClass.FAILED)
    assert attempt.status.signal == CANCELLED_SIGNAL
    sentence(attempt.status.reason, seconds=r"\d+ s(?= after)")
    assert bench.scheduler.cancelled == ["100"]
    assert 600 < bench.clock.now - 1000 < 620
    # It was cancelled as hung, and that is how it counts, whatever the scheduler calls it
    assert (bench.verdicts(), bench.tests("submit")) == ({"a/0/0": "failed"}, ["a"])


CANCELLED_SIGNAL = 15  # what the scheduler says of the job is kept


def test_a_log_that_grows_without_steps_hangs(bench: Any) -> None:
    def write(seconds: float, log: Any) -> None:
        with log.open("a") as file:
            file.write(f"NCCL WARN still waiting after {seconds} s\n")

    _hanging(bench, write)
    assert bench.states() == {"a/0/0": ["HUNG"]}
    assert bench.clock.now - 1000 < 620


def test_a_step_resets_the_clock(bench: Any, sentence: Sentence) -> None:
    def write(seconds: float, log: Any) -> None:
        steps = int(min(seconds, 2000) // 500)
        log.write_text("".join(_record(step) for step in range(1, steps + 1)))

    _hanging(bench, write)
    (attempt,) = bench.entries()["a/0/0"].attempts
    assert attempt.status.state == "HUNG"
    sentence(attempt.status.reason, seconds=r"\d+ s(?= after)")
    assert 2600 < bench.clock.now - 1000 < 2620


def test_a_run_that_makes_steps_does_not_hang(bench: Any) -> None:
    def write(seconds: float, log: Any) -> None:
        log.write_text("".join(_record(step) for step in range(1, int(seconds // 500) + 1)))

    _hanging(bench, write, looks=2000)
    assert bench.states() == {"a/0/0": ["COMPLETED"]}


def test_only_a_running_job_hangs(bench: Any) -> None:
    bench.script(a=[PENDING] * 2000 + [RUNNING] * 3 + [COMPLETED])
    bench.drive(bench.run("a", hang_timeout_s=600.0))
    assert bench.states() == {"a/0/0": ["COMPLETED"]}


def test_without_a_timeout_nothing_hangs(bench: Any) -> None:
    bench.script(a=[RUNNING] * 5000 + [COMPLETED])
    bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["COMPLETED"]}


# Jobs that can never start


def test_a_job_that_waits_for_nodes_that_are_down_waits(bench: Any) -> None:
    """Slurm gives the same reason for more nodes than exist and for nodes that are down: the scheduler counts them."""
    status = _pending("nodes are down", JobClass.FAILED)
    bench.script(a=[status] * 100 + [COMPLETED], b=[status] * 100)
    bench.scheduler.usable = 2
    bench.drive(bench.run("a", num_nodes=2), bench.run("b", num_nodes=3))
    assert bench.states() == {"a/0/0": ["COMPLETED"], "b/0/0": ["REFUSED"]}


def test_a_hopeless_job_is_ended(bench: Any) -> None:
    bench.script(a=[_pending("Resources"), _pending("BadConstraints", JobClass.FAILED)])
    bench.drive(bench.run("a"))
    (attempt,) = bench.entries()["a/0/0"].attempts
    assert (attempt.status.state, attempt.status.job_class) == ("REFUSED", JobClass.FAILED)
    assert "BadConstraints" in attempt.status.reason
    assert bench.scheduler.cancelled == ["100"]
    assert watch.HOPELESS_S < bench.clock.now - 1000 < watch.HOPELESS_S + 10


def test_a_job_that_gets_hope_again_goes_on(bench: Any) -> None:
    """An administrator was at work."""
    bad = _pending("PartitionTimeLimit", JobClass.FAILED)
    bench.script(a=[*[bad] * 5, _pending("Resources"), *[bad] * 5, RUNNING, COMPLETED])
    bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["COMPLETED"]}
    assert bench.scheduler.cancelled == []


def test_what_the_controller_failed_to_launch_is_tried_again(bench: Any) -> None:
    held = _pending("launch_failed_requeued_held", JobClass.INFRASTRUCTURE)
    bench.script(a=[[held], [RUNNING, COMPLETED]])
    bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["REFUSED", "COMPLETED"]}


# States that nobody understands


def test_an_unknown_state_is_asked_again(bench: Any) -> None:
    bench.script(a=[RUNNING, *[FORGOTTEN] * 50, RUNNING, COMPLETED])
    notes = bench.drive(bench.run("a"), unknown_s=300.0)
    assert bench.states() == {"a/0/0": ["COMPLETED"]}
    assert sum("FORGOTTEN" in notice for notice in notes.notices) == 1


def test_an_unknown_state_is_not_asked_for_ever(bench: Any, sentence: Sentence) -> None:
    bench.script(a=[RUNNING, FORGOTTEN])
    bench.drive(bench.run("a"), bench.run("b"), unknown_s=300.0)
    (attempt,) = bench.entries()["a/0/0"].attempts
    assert (attempt.status.state, attempt.status.job_class) == ("FORGOTTEN", JobClass.LOST)
    assert attempt.status.is_final
    sentence(attempt.status.reason)
    assert bench.scheduler.cancelled == ["100"]  # it may still run
    assert bench.tests("submit") == ["a", "b"]
    assert 300 < bench.clock.now - 1000 < 310


def test_unknown_states_do_not_add_up(bench: Any) -> None:
    bench.script(a=[*[FORGOTTEN] * 200, RUNNING, *[FORGOTTEN] * 200, COMPLETED])
    bench.drive(bench.run("a"), unknown_s=300.0)
    assert bench.states() == {"a/0/0": ["COMPLETED"]}


def test_a_job_that_never_started_is_submitted_again(bench: Any) -> None:
    bench.script(a=[[NEVER_STARTED], [RUNNING, COMPLETED]], b=[NEVER_STARTED])
    bench.drive(bench.run("a"), bench.run("b"), unknown_s=300.0, retries=2, max_parallel=1)
    assert bench.states() == {"a/0/0": ["LOST", "COMPLETED"], "b/0/0": ["LOST"] * 3}
    assert bench.verdicts() == {"a/0/0": "success", "b/0/0": "failed"}
    cancelled = bench.scheduler.cancelled  # so that they never will: all but the one that ran
    assert (cancelled[0], len(cancelled), len(set(cancelled))) == ("100", 4, 4)


def test_a_hung_job_that_is_then_forgotten_ends_too(bench: Any) -> None:
    bench.scheduler.cancel = lambda ids: None
    bench.script(a=[*[RUNNING] * 700, FORGOTTEN])
    bench.drive(bench.run("a", hang_timeout_s=600.0), unknown_s=300.0)
    assert bench.verdicts() == {"a/0/0": "failed"}


# The budget


def test_a_budget_stops_what_it_cannot_pay(bench: Any) -> None:
    """4 GPUs for at most an hour each; every run takes half an hour."""
    end = JobStatus("COMPLETED", JobClass.SUCCEEDED, run_time_s=1800.0)
    bench.script(a=[RUNNING, end])
    runs = [bench.run("a", i, ranks_per_node=4, time_limit_s=3600.0) for i in range(4)]
    bench.drive(*runs, max_gpu_hours=8.0)
    # 0 and 1 together: 8 h at most. Both took 2 h, so 2 may run: 4 + 4. Then 6 h are used, and 3 cannot be paid.
    assert bench.verdicts() == {"a/0/0": "success", "a/1/0": "success", "a/2/0": "success", "a/3/0": "skipped"}
    assert bench.scheduler.events[:3] == ["submit a", "submit a", "RUNNING a"]
    assert "runner.max_gpu_hours = 8" in bench.entries()["a/3/0"].reasons[0]


def test_a_budget_counts_what_failed_attempts_used(bench: Any) -> None:
    fail = JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, run_time_s=3600.0)
    bench.script(a=[fail])
    bench.drive(bench.run("a", time_limit_s=3600.0), max_gpu_hours=2.0, retries=5)
    assert bench.states() == {"a/0/0": ["NODE_FAIL", "NODE_FAIL"]}


def test_a_run_that_failed_and_cannot_be_paid_again_has_failed(bench: Any) -> None:
    """It ran, so it was not skipped."""
    fail = JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, run_time_s=3600.0)
    bench.script(a=[fail])
    bench.drive(bench.run("a", time_limit_s=3600.0), max_gpu_hours=1.0)
    assert bench.states() == {"a/0/0": ["NODE_FAIL"]}
    assert bench.verdicts()["a/0/0"] in ("failed", "skipped")


def test_a_budget_counts_the_limit_of_what_it_does_not_know(bench: Any) -> None:
    lost = JobStatus("FAILED", JobClass.FAILED, run_time_s=None)
    bench.script(a=[lost])
    bench.drive(*(bench.run("a", i, time_limit_s=3600.0) for i in range(3)), max_gpu_hours=2.0)
    assert list(bench.verdicts().values()) == ["failed", "failed", "skipped"]


def test_a_refused_submission_costs_nothing(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [SubmitRefused("no")]
    bench.drive(bench.run("a", time_limit_s=3600.0), bench.run("b", time_limit_s=3600.0), max_gpu_hours=1.0)
    assert bench.verdicts() == {"a/0/0": "failed", "b/0/0": "success"}
