"""Every run is submitted exactly once, whatever becomes of the command that submits."""

import signal
from itertools import pairwise
from typing import Any

import pytest

from cloudai_mbridge.errors import Paused, ToolFailure
from cloudai_mbridge.runner.interrupt import Interrupted
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus, SubmitLater
from tests.golden import Sentence
from tests.runner.conftest import COMPLETED, RUNNING

SETTLE_S = 15.0  # the default
FAILED = JobStatus("FAILED", JobClass.FAILED, exit_code=1)
UNSURE = ToolFailure("sbatch did not respond within 60 s")


def _limit() -> SubmitLater:
    return SubmitLater("sbatch: error: QOSMaxSubmitJobPerUserLimit", is_limit=True)


def _array(bench: Any, count: int) -> list[Any]:
    bench.scheduler.together = True
    return [bench.run("a", i, array="arrays/0", array_index=i) for i in range(count)]


# Nobody knows whether it was submitted


def test_what_was_submitted_after_all_is_adopted(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.taken_at = {1: 0.0}
    bench.drive(bench.run("a"), bench.run("b"))
    assert bench.states() == {"a/0/0": ["COMPLETED"], "b/0/0": ["COMPLETED"]}
    assert bench.tests("submit") == ["b"]
    assert bench.entries()["a/0/0"].last.job_id == "100"
    assert bench.scheduler.cancelled == []


def test_what_is_seen_late_is_adopted(bench: Any) -> None:
    """The controller answers, and a moment later takes the job of a sbatch that gave up."""
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.taken_at = {1: bench.clock.now + SETTLE_S / 2}
    bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["COMPLETED"]}
    assert len(bench.scheduler.submissions) == 1


def test_what_was_not_submitted_is_submitted_again(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.drive(bench.run("a"))
    first, second = bench.scheduler.submissions
    assert first.token != second.token
    assert bench.states() == {"a/0/0": ["COMPLETED"]}  # one attempt: the other one was none
    assert bench.entries()["a/0/0"].last.token == second.token
    assert bench.clock.now - 1000 > SETTLE_S


def test_it_settles_once_the_scheduler_answers(bench: Any) -> None:
    """While the controller is down it takes nothing, so that time proves nothing."""
    down = 200
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.find_error = [ToolFailure("squeue failed")] * down
    bench.scheduler.taken_at = {1: bench.clock.now + down + 5}
    bench.drive(bench.run("a"))
    assert len(bench.scheduler.submissions) == 1
    assert bench.states() == {"a/0/0": ["COMPLETED"]}


def test_nothing_else_is_submitted_in_between(bench: Any) -> None:
    bench.scheduler.refuse["b"] = [UNSURE]
    bench.drive(bench.run("a"), bench.run("b"), bench.run("c"))
    assert bench.tests("submit") == ["a", "b", "c"]
    events = bench.scheduler.events
    assert events.index("COMPLETED a") < events.index("submit c")


def test_a_scheduler_that_never_answers_again_pauses(bench: Any, sentence: Sentence) -> None:
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.find_error = [ToolFailure("squeue failed")] * 10**5
    with pytest.raises(Paused) as caught:
        bench.drive(bench.run("a"), patience_s=600.0)
    token = bench.scheduler.submissions[0].token
    sentence(caught, token=r"[0-9a-f]{16}")
    assert bench.entries()["a/0/0"].last.token == token


def test_a_stray_is_cancelled(bench: Any) -> None:
    """The controller takes a job long after everybody has given it up; the run has another one by then."""
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.taken_at = {1: bench.clock.now + 3 * SETTLE_S}
    bench.script(a=[[RUNNING] * 100, [RUNNING] * 100 + [COMPLETED]])
    notes = bench.drive(bench.run("a"))
    last = bench.entries()["a/0/0"].last
    assert bench.scheduler.cancelled == ["100"]
    assert (last.job_id, last.status.state) == ("101", "COMPLETED")
    assert any("cancelling 100" in notice for notice in notes.notices)


def test_a_stray_is_cancelled_once(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.taken_at = {1: bench.clock.now + 3 * SETTLE_S}
    bench.script(a=[[RUNNING], [RUNNING] * 300 + [COMPLETED]])
    bench.drive(bench.run("a"))
    assert bench.scheduler.cancelled == ["100"]


def test_a_stray_that_cannot_be_cancelled_is_cancelled_later(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.taken_at = {1: bench.clock.now + 3 * SETTLE_S}
    bench.scheduler.cancel_error = [ToolFailure("scancel failed")] * 3
    bench.script(a=[[RUNNING], [RUNNING] * 100 + [COMPLETED]])
    bench.drive(bench.run("a"))
    assert bench.scheduler.cancelled == ["100"]
    assert bench.states() == {"a/0/0": ["COMPLETED"]}


def test_an_interrupt_waits_for_what_is_unsure(bench: Any) -> None:
    """And cancels it, if it turns out to have been submitted."""
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.taken_at = {2: bench.clock.now + SETTLE_S / 2}
    bench.script(b=[signal.SIGINT, RUNNING])
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("b"), bench.run("a"))
    assert caught.value.left_running == ""
    assert sorted(set(bench.scheduler.cancelled)) == ["100", "101"]
    assert bench.states() == {"b/0/0": ["INTERRUPTED"], "a/0/0": ["INTERRUPTED"]}


def test_an_interrupt_while_nothing_is_known_names_the_submission(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [UNSURE]

    def find(submissions: Any, root: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        raise ToolFailure("squeue failed")

    bench.scheduler.find = find
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"))
    assert caught.value.left_running == f"a submission as {bench.scheduler.submissions[0].token}"


@pytest.mark.parametrize("is_taken", [True, False])
def test_fail_fast_ends_what_is_unsure_too(bench: Any, is_taken: bool) -> None:
    bench.scheduler.refuse["b"] = [UNSURE]
    bench.scheduler.taken_at = {2: bench.clock.now + 5} if is_taken else {}
    bench.script(a=[RUNNING, FAILED], b=[RUNNING] * 30 + [COMPLETED])
    bench.drive(bench.run("a"), bench.run("b"), fail_fast=True)
    assert bench.tests("submit") == ["a"]
    assert bench.verdicts()["b/0/0"] in ("failed", "skipped")


def test_submissions_that_never_succeed_are_given_up(bench: Any, sentence: Sentence) -> None:
    """The scheduler answers, so patience with its silence never ends; patience with its submissions does."""
    bench.scheduler.refuse["a"] = [UNSURE for _ in range(1000)]
    with pytest.raises(Paused) as caught:
        bench.drive(bench.run("a"), bench.run("b"), patience_s=100)
    sentence(caught)
    assert bench.verdicts()["a/0/0"] is None
    assert bench.clock.now - 1000 < 200


# Arrays of which a part is found


def _partly_found(bench: Any, *script: Any) -> None:
    """Drive an array of two of which nobody saw the submission, and only the first task is ever seen."""
    runs = _array(bench, 2)
    bench.scheduler.refuse["a"] = [UNSURE]
    bench.scheduler.taken_at = {1: 0.0}
    bench.scheduler.hidden = {"a/1/0"}
    bench.script(**{"a/0/0": list(script), "a/1/0": [RUNNING, COMPLETED]})
    bench.drive(*runs)


def test_the_rest_of_an_array_is_submitted_again(bench: Any) -> None:
    _partly_found(bench, RUNNING, COMPLETED)
    assert [run.key for run in bench.scheduler.submissions[1].runs] == ["a/1/0"]
    assert bench.states()["a/1/0"] == ["COMPLETED"]


def test_a_part_of_an_array_is_adopted_once(bench: Any) -> None:
    """Adopting it again takes back what is known of the job, be it that it has ended."""
    _partly_found(bench, RUNNING, COMPLETED)
    assert sum("job 100" in text for text in bench.events()) == 1
    assert bench.states()["a/0/0"] == ["COMPLETED"]


def test_an_adopted_part_of_an_array_is_no_stray(bench: Any) -> None:
    _partly_found(bench, *[RUNNING] * 100, COMPLETED)
    assert "100" not in bench.scheduler.cancelled
    assert bench.verdicts()["a/0/0"] == "success"


# Nothing was submitted, and it is worth another try


def test_a_busy_scheduler_is_tried_again(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [SubmitLater("Slurm temporarily unable to accept job") for _ in range(4)]
    notes = bench.drive(bench.run("a"), bench.run("b"))
    assert bench.states() == {"a/0/0": ["COMPLETED"], "b/0/0": ["COMPLETED"]}
    assert bench.tests("submit") == ["a", "b"]
    assert sum("submitting again later" in notice for notice in notes.notices) == 1


def test_every_try_waits_longer(bench: Any) -> None:
    times: list[float] = []
    submit = bench.scheduler.submit
    bench.scheduler.submit = lambda *args: (times.append(bench.clock.now), submit(*args))[1]
    bench.scheduler.refuse["a"] = [SubmitLater("busy") for _ in range(10)]
    bench.drive(bench.run("a"))
    waits = [after - before for before, after in pairwise(times)]
    assert all(after > before - 1.5 for before, after in pairwise(waits))
    assert waits[0] < 5
    assert 50 < max(waits) < 65


def test_a_limit_on_jobs_halves_an_array(bench: Any) -> None:
    runs = _array(bench, 8)
    bench.scheduler.refuse["a"] = [_limit(), _limit()]
    bench.drive(*runs)
    assert [len(submission.runs) for submission in bench.scheduler.submissions][:3] == [8, 4, 2]
    assert set(bench.verdicts().values()) == {"success"}
    assert len(bench.verdicts()) == 8


def test_after_a_success_it_tries_more_again(bench: Any) -> None:
    runs = _array(bench, 16)
    bench.scheduler.refuse["a"] = [_limit(), _limit(), _limit()]
    bench.drive(*runs)
    assert [len(submission.runs) for submission in bench.scheduler.submissions] == [16, 8, 4, 2, 4, 8, 2]


def test_a_limit_that_own_jobs_fill_is_waited_for(bench: Any) -> None:
    """Two may be submitted at a time, and each takes much longer than the patience with a silent scheduler."""
    scheduler = bench.scheduler
    submit, poll, alive = scheduler.submit, scheduler.poll, [0]

    def limited(submission: Any, root: Any) -> Any:
        if alive[0] >= 2:
            raise _limit()
        alive[0] += len(submission.runs)
        return submit(submission, root)

    def count(jobs: Any) -> Any:
        seen = poll(jobs)
        alive[0] -= sum(job.status.is_final for job in seen.values())
        return seen

    scheduler.submit, scheduler.poll = limited, count
    bench.script(a=[*[RUNNING] * 500, COMPLETED])
    bench.drive(*(bench.run("a", i) for i in range(5)), patience_s=100.0)
    assert set(bench.verdicts().values()) == {"success"}
    assert bench.states() == {f"a/{i}/0": ["COMPLETED"] for i in range(5)}


def test_a_limit_that_others_fill_ends_the_patience(bench: Any, sentence: Sentence) -> None:
    bench.scheduler.refuse["a"] = [_limit() for _ in range(10**4)]
    with pytest.raises(Paused) as caught:
        bench.drive(bench.run("a"), bench.run("b"), patience_s=300.0)
    sentence(caught)
    assert bench.entries()["a/0/0"].attempts == ()
    assert bench.verdicts() == {"a/0/0": None, "b/0/0": None}


def test_what_was_put_off_is_no_attempt(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [SubmitLater("busy"), SubmitLater("busy")]
    bench.drive(bench.run("a"))
    (attempt,) = bench.entries()["a/0/0"].attempts
    assert attempt.number == 1


# Batches


def test_an_array_is_one_submission(bench: Any) -> None:
    bench.drive(*_array(bench, 5), bench.run("b"))
    assert [len(submission.runs) for submission in bench.scheduler.submissions] == [5, 1]
    assert [submission.parallel for submission in bench.scheduler.submissions] == [None, None]
    tokens = {entry.last.token for key, entry in bench.entries().items() if key.startswith("a/")}
    assert tokens == {bench.scheduler.submissions[0].token}


def test_an_array_gets_the_limit_on_active_runs(bench: Any) -> None:
    """It is submitted as a whole, and the scheduler keeps the limit."""
    bench.drive(*_array(bench, 5), max_parallel=2)
    (submission,) = bench.scheduler.submissions
    assert (len(submission.runs), submission.parallel) == (5, 2)


def test_what_comes_after_an_array_waits_for_its_slots(bench: Any) -> None:
    runs = _array(bench, 3)
    bench.script(**{f"a/{i}/0": [RUNNING] * (3 * i + 1) + [COMPLETED] for i in range(3)})
    bench.drive(*runs, bench.run("b"), max_parallel=2)
    events = bench.scheduler.events
    completed = [i for i, event in enumerate(events) if event == "COMPLETED a"]
    assert completed[1] < events.index("submit b") < completed[2]  # one of the two slots is free
    assert [submission.parallel for submission in bench.scheduler.submissions] == [2, None]


def test_a_budget_may_take_a_part_of_an_array(bench: Any) -> None:
    bench.scheduler.together = True
    runs = [bench.run("a", i, array="arrays/0", array_index=i, time_limit_s=3600.0) for i in range(4)]
    bench.script(a=[JobStatus("COMPLETED", JobClass.SUCCEEDED, run_time_s=3600.0)])
    bench.drive(*runs, max_gpu_hours=3.0)
    assert [len(submission.runs) for submission in bench.scheduler.submissions] == [3]
    assert list(bench.verdicts().values()) == ["success"] * 3 + ["skipped"]


def test_a_retry_of_a_task_goes_alone(bench: Any) -> None:
    bad = JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, run_time_s=1.0)
    runs = _array(bench, 3)
    bench.script(**{"a/1/0": [[bad], [RUNNING, COMPLETED]]})
    bench.drive(*runs)
    assert [[run.key for run in submission.runs] for submission in bench.scheduler.submissions] == [
        ["a/0/0", "a/1/0", "a/2/0"],
        ["a/1/0"],
    ]
    assert bench.states()["a/1/0"] == ["NODE_FAIL", "COMPLETED"]


def test_a_scheduler_that_cannot_say_how_to_batch_is_asked_again(bench: Any) -> None:
    batches, errors = bench.scheduler.batches, [ToolFailure("scontrol failed"), ToolFailure("scontrol failed")]

    def fail(runs: Any) -> Any:
        if errors:
            raise errors.pop()
        return batches(runs)

    bench.scheduler.batches = fail
    bench.drive(bench.run("a"))
    assert bench.verdicts() == {"a/0/0": "success"}
