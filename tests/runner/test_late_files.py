"""A job's files may be seen seconds after its end: it is judged when they are there, or when they were waited for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudai_mbridge.schedulers.interface import NEVER_BEGAN, JobClass, JobStatus
from cloudai_mbridge.training.process.log_lines import STEP_MARK, render_record
from tests.runner.conftest import COMPLETED, RUNNING

FAILED = JobStatus("FAILED", JobClass.FAILED, exit_code=3, nodes="n1", run_time_s=60.0)
NOT_BEGUN = JobStatus("LAUNCH_FAILED", JobClass.INFRASTRUCTURE, exit_code=3, reason=NEVER_BEGAN, nodes="n1")
NOT_LAUNCHED = JobStatus("LAUNCH_FAILED", JobClass.INFRASTRUCTURE, signal=53, reason=NEVER_BEGAN, nodes="n1")
KILLED = JobStatus("FAILED", JobClass.FAILED, signal=9, nodes="n1", run_time_s=60.0)


def _log(*steps: int) -> str:
    values = {"step_time_s": 0.5, "tflops_per_gpu": 9.0, "losses": {"lm loss": 5.0}}
    return "".join(f"{render_record(STEP_MARK, {'step': step, **values})}\n" for step in steps)


def _judged_at(bench: Any, status: JobStatus, late: Callable[[float], None], **config: Any) -> float:
    """Return how many seconds after its job's end a run of three steps is judged. late: what is seen by then."""
    ends: list[float] = []
    judged: list[float] = []
    poll, judge = bench.scheduler.poll, bench.judge

    def look(jobs: Any) -> Any:
        seen = poll(jobs)
        if any(each.status.is_final for each in seen.values()):
            ends.append(bench.clock())
            late(bench.clock() - ends[0])
        return seen

    def judge_now(*arguments: Any) -> Any:
        judged.append(bench.clock())
        return judge(*arguments)

    bench.scheduler.poll, bench.judge = look, judge_now
    bench.script(a=[RUNNING, *[status] * 200])
    bench.drive(bench.run("a", num_steps=3), may_be_late=True, **config)
    assert len(judged) == 1
    return judged[0] - ends[0]


@pytest.mark.parametrize("seconds", [0, 4, 20])
def test_the_log_of_a_good_job_is_waited_for(bench: Any, seconds: int) -> None:
    def late(after_s: float) -> None:
        log = bench.root / "a/0/0/stdout.txt"
        log.write_text(_log(1) if after_s < seconds else _log(1, 2, 3))

    assert seconds <= _judged_at(bench, COMPLETED, late) <= seconds + 2
    assert bool(seconds) == any("1 of 3 steps are in the log" in text for text in bench.notes.notices)


def test_a_log_that_stays_short_is_not_waited_for_without_end(bench: Any) -> None:
    assert 30 <= _judged_at(bench, COMPLETED, lambda after_s: None, late_files_s=30) <= 32


def test_the_end_of_a_job_that_failed_is_waited_for(bench: Any) -> None:
    def late(after_s: float) -> None:
        (bench.root / "a/0/0/started.txt").touch()
        if after_s >= 7:
            (bench.root / "a/0/0/exit_code.txt").write_text("3\n")

    assert 7 <= _judged_at(bench, FAILED, late) <= 9


@pytest.mark.parametrize(("then", "signal"), [(FAILED, None), (KILLED, 9)])
def test_a_start_mark_that_is_late_makes_no_launch_failure(bench: Any, then: JobStatus, signal: int | None) -> None:
    """Otherwise the job would be submitted again, and train twice."""
    bench.script(a=[RUNNING, *[replace(NOT_BEGUN, signal=signal)] * 5, *[then] * 100])
    bench.drive(bench.run("a", num_steps=3), may_be_late=True, retries=1)
    assert bench.scheduler.events.count("submit a") == 1
    assert any("its start mark is missing" in text for text in bench.notes.notices)


def test_a_job_that_slurm_could_not_launch_is_judged_at_once(bench: Any) -> None:
    assert _judged_at(bench, NOT_LAUNCHED, lambda after_s: None, retries=0) <= 1


def test_a_job_that_was_killed_is_judged_at_once(bench: Any) -> None:
    assert _judged_at(bench, KILLED, lambda after_s: None) <= 1
