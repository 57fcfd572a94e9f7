"""A driver may die at any moment; the next one goes on from what the journal says, and submits nothing twice."""

import contextlib
import signal
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from cloudai_mbridge.errors import Damaged, Paused
from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.runner.interrupt import Interrupted
from cloudai_mbridge.runner.lock import request_cancel
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus, Submission
from tests.golden import Sentence
from tests.runner.conftest import COMPLETED, PENDING, RUNNING

FAILED = JobStatus("FAILED", JobClass.FAILED, exit_code=1, run_time_s=60.0)
NODE_FAIL = JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, nodes="n1", run_time_s=60.0)
FORGOTTEN = JobStatus("FORGOTTEN", JobClass.UNKNOWN)
INTERRUPTED = JobStatus("INTERRUPTED", JobClass.CANCELLED, reason="mbridge was stopped")
HUNG = JobStatus("HUNG", JobClass.FAILED, reason="no step for 1801 s after step 3")
KEY, TOKEN, JOB = "a/0/0", "cafe", "17"


def _left(bench: Any, *steps: Callable[[Journal], None], job: bool = True) -> None:
    """Write what a dead driver has left; `job`: the scheduler has a job of that token."""
    journal = bench.write(KEY)
    for step in steps:
        step(journal)
    journal.close()
    if job:
        bench.scheduler.add(JOB, KEY)
        bench.scheduler._tokens[TOKEN] = (0.0, {KEY: JOB})


def intended(journal: Journal) -> None:
    journal.intend([(KEY, 1)], TOKEN)


def submitted(journal: Journal) -> None:
    intended(journal)
    journal.submitted(KEY, 1, JOB)
    journal.saw(KEY, 1, PENDING)


def running(journal: Journal) -> None:
    submitted(journal)
    journal.saw(KEY, 1, RUNNING)


def ended_as(status: JobStatus) -> Callable[[Journal], None]:
    def write(journal: Journal) -> None:
        running(journal)
        journal.saw(KEY, 1, status)

    return write


def _go_on(bench: Any, **keys: Any) -> Any:
    bench.drive(bench.run("a"), **keys)
    return bench.entries()[KEY]


def test_planned_and_nothing_more(bench: Any) -> None:
    _left(bench, job=False)
    assert _go_on(bench).verdict == "success"
    assert len(bench.scheduler.submissions) == 1


def test_intended_and_not_submitted(bench: Any) -> None:
    _left(bench, intended, job=False)
    entry = _go_on(bench)
    assert entry.verdict == "success"
    (attempt,) = entry.attempts
    assert (attempt.number, attempt.token) == (1, bench.scheduler.submissions[0].token)


def test_intended_and_submitted_and_nobody_wrote_it_down(bench: Any) -> None:
    _left(bench, intended)
    entry = _go_on(bench)
    assert bench.scheduler.submissions == []
    (attempt,) = entry.attempts
    assert (entry.verdict, attempt.token, attempt.job_id) == ("success", TOKEN, JOB)


def test_an_array_that_nobody_wrote_down(bench: Any) -> None:
    bench.scheduler.together = True
    runs = [bench.run("a", i, array="arrays/0", array_index=i) for i in range(3)]
    journal = bench.write(*(run.key for run in runs))
    journal.intend([(run.key, 1) for run in runs], TOKEN)
    journal.close()
    bench.scheduler.start(Submission(TOKEN, tuple(runs)))
    bench.drive(*runs)
    assert bench.scheduler.submissions == []
    assert set(bench.verdicts().values()) == {"success"}


@pytest.mark.parametrize("state", [submitted, running])
def test_a_job_under_way_is_followed(bench: Any, state: Callable[[Journal], None]) -> None:
    _left(bench, state)
    entry = _go_on(bench)
    assert (entry.verdict, entry.last.job_id) == ("success", JOB)
    assert bench.scheduler.submissions == []


@pytest.mark.parametrize(("status", "verdict"), [(COMPLETED, "success"), (FAILED, "failed")])
def test_an_end_that_nobody_judged_is_judged(bench: Any, status: JobStatus, verdict: str) -> None:
    _left(bench, ended_as(status))
    assert _go_on(bench).verdict == verdict
    assert bench.scheduler.events == []


def test_an_infrastructure_failure_that_nobody_judged_is_tried_again(bench: Any) -> None:
    _left(bench, ended_as(NODE_FAIL))
    bench.script(a=[COMPLETED])
    entry = _go_on(bench)
    assert [attempt.status.state for attempt in entry.attempts] == ["NODE_FAIL", "COMPLETED"]
    assert entry.attempts[0].failure == "node_fail"


def test_a_retry_that_was_decided_and_not_submitted(bench: Any) -> None:
    _left(bench, ended_as(NODE_FAIL), lambda journal: journal.failed(KEY, 1, "node_fail"))
    (bench.root / KEY).mkdir(parents=True)
    (bench.root / KEY / "stdout.txt").write_text("attempt 1")
    entry = _go_on(bench)
    assert (entry.verdict, len(entry.attempts)) == ("success", 2)
    assert (bench.root / KEY / "attempt-1" / "stdout.txt").read_text() == "attempt 1"


def test_retries_are_counted_over_all_processes(bench: Any) -> None:
    _left(bench, ended_as(NODE_FAIL), lambda journal: journal.failed(KEY, 1, "node_fail"))
    bench.script(a=[NODE_FAIL])
    entry = _go_on(bench, retries=2)
    assert len(entry.attempts) == 3
    assert entry.verdict == "failed"


def test_a_budget_is_counted_over_all_processes(bench: Any) -> None:
    long = JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, run_time_s=3600.0)
    _left(bench, ended_as(long), lambda journal: journal.failed(KEY, 1, "node_fail"))
    bench.drive(bench.run("a", time_limit_s=3600.0), max_gpu_hours=1.5)
    assert bench.scheduler.submissions == []
    assert bench.verdicts()[KEY] is not None


@pytest.mark.parametrize("verdict", ["success", "failed", "skipped"])
def test_what_is_decided_stays(bench: Any, verdict: str) -> None:
    _left(bench, ended_as(COMPLETED), lambda journal: journal.decided(KEY, verdict, ["why"]))
    entry = _go_on(bench)
    assert (entry.verdict, entry.reasons) == (verdict, ("why",))
    assert bench.scheduler.events == []


def test_what_was_skipped_without_an_attempt_stays(bench: Any) -> None:
    _left(bench, lambda journal: journal.decided(KEY, "skipped", ["why"]), job=False)
    assert _go_on(bench).verdict == "skipped"
    assert bench.scheduler.submissions == []


def test_a_refusal_that_nobody_judged(bench: Any) -> None:
    def refused(journal: Journal) -> None:
        intended(journal)
        journal.saw(KEY, 1, JobStatus("REFUSED", JobClass.FAILED, reason="no", run_time_s=0.0))

    _left(bench, refused, job=False)
    assert _go_on(bench).verdict == "failed"
    assert bench.scheduler.submissions == []


@pytest.mark.parametrize("was_heard", [True, False])
def test_a_job_that_was_being_cancelled_as_hung(bench: Any, was_heard: bool) -> None:
    """Whether the dead driver's scancel reached the scheduler or not."""
    _left(bench, running, lambda journal: journal.ending(KEY, 1, HUNG))
    bench.script(a=[RUNNING])
    bench.scheduler.script["a"] = [RUNNING]
    bench.scheduler._looks[JOB] = iter([RUNNING])
    if was_heard:
        bench.scheduler.cancelled.append(JOB)
    entry = _go_on(bench)
    (attempt,) = entry.attempts
    assert (attempt.status.state, attempt.status.reason, entry.verdict) == ("HUNG", HUNG.reason, "failed")
    assert JOB in bench.scheduler.cancelled


@pytest.mark.parametrize("was_heard", [True, False])
def test_a_job_that_was_being_cancelled_by_an_interrupt(bench: Any, was_heard: bool) -> None:
    """To resume means to want it: it is ended, and submitted again."""
    _left(bench, running, lambda journal: journal.ending(KEY, 1, INTERRUPTED))
    bench.scheduler._looks[JOB] = iter([RUNNING])
    if was_heard:
        bench.scheduler.cancelled.append(JOB)
    entry = _go_on(bench)
    assert [attempt.status.state for attempt in entry.attempts] == ["INTERRUPTED", "COMPLETED"]
    assert entry.verdict == "success"


def test_an_interrupted_run_is_taken_up_again(bench: Any) -> None:
    bench.script(a=[[RUNNING], [RUNNING, COMPLETED]])
    journal = bench.write(KEY)
    journal.close()
    poll, looks = bench.scheduler.poll, []

    def interrupt(jobs: Any) -> Any:
        looks.append(jobs)
        if len(looks) == 2:
            request_cancel(bench.root)
        return poll(jobs)

    bench.scheduler.poll = interrupt
    with pytest.raises(Interrupted):
        bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert bench.entries()[KEY].verdict == "failed"
    bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert bench.states() == {KEY: ["INTERRUPTED", "COMPLETED"], "b/0/0": ["COMPLETED"]}
    assert bench.verdicts() == {KEY: "success", "b/0/0": "success"}
    assert bench.entries()[KEY].attempts[0].failure == ""  # it is not a retry


def test_a_claim_without_any_journal_is_damage(bench: Any, sentence: Sentence) -> None:
    """The journal and the log of submissions are gone; a launcher leaves nothing else behind."""
    (bench.root / KEY).mkdir(parents=True)
    take_claim(bench.root / KEY, "0" * 16, None)
    bench.drive(bench.run("a"))  # only mbridge itself has claimed it
    for name in ("journal.sqlite", "submissions.jsonl"):
        (bench.root / name).unlink()
    take_claim(bench.root / KEY, "1" * 16, f"launcher-17.{'1' * 16}")
    with pytest.raises(Damaged) as caught:
        bench.drive(bench.run("a"))
    sentence(caught)


@pytest.mark.parametrize("line", ["", '{"token": "0123', '{"token": "0123"}'])
def test_a_job_that_no_file_knows_is_damage(bench: Any, sentence: Sentence, line: str) -> None:
    """The journal is gone, and of the log of submissions the end."""
    (bench.root / KEY).mkdir(parents=True)
    submit = bench.scheduler.submit

    def claimed(submission: Submission, root: Any) -> Any:
        ids = submit(submission, root)
        for key, job_id in ids.items():
            take_claim(root / key, submission.token, job_id)
        return ids

    bench.scheduler.submit = claimed
    bench.drive(bench.run("a"), bench.run("b"))
    bench.path.unlink()
    log = bench.root / "submissions.jsonl"
    log.write_text(log.read_text().splitlines()[0] + "\n" + line)
    with pytest.raises(Damaged) as caught:
        bench.drive(bench.run("a"), bench.run("b"))
    sentence(caught)


def test_a_damaged_log_cannot_stand_in_for_the_journal(bench: Any, sentence: Sentence) -> None:
    """The job that the line was about may wait in the queue, and have left nothing yet."""
    bench.drive(bench.run("a"), bench.run("b"))
    log = bench.root / "submissions.jsonl"
    log.write_text(log.read_text().replace('"token"', '"tok?n"', 1))
    bench.drive(bench.run("a"), bench.run("b"))  # the journal knows all
    assert len(bench.scheduler.submissions) == 2
    bench.path.unlink()
    with pytest.raises(Damaged, match=r"submissions\.jsonl:1:") as caught:
        bench.drive(bench.run("a"), bench.run("b"))
    sentence(caught)


def test_an_attempt_that_cannot_be_read_is_not_recovered_twice(bench: Any) -> None:
    """Its number is not one, as in tables that another tool has copied; the log of submissions has it, too."""
    bench.drive(bench.run("a"), bench.run("b"))
    with contextlib.closing(sqlite3.connect(bench.path, isolation_level=None)) as db:
        db.executescript(
            "CREATE TABLE copied AS SELECT * FROM attempts; DROP TABLE attempts; ALTER TABLE copied RENAME TO attempts;"
            " UPDATE attempts SET number = 'one' WHERE key = 'a/0/0';"
        )
    bench.drive(bench.run("a"), bench.run("b"))
    assert len(bench.scheduler.submissions) == 2


@pytest.mark.parametrize("damaged", ["0123456789abcdef", "cafe", ""])
def test_a_damaged_token_is_read_from_the_log(bench: Any, damaged: str) -> None:
    """Under a wrong token its job is not found, and would be submitted again beside it."""
    bench.script(a=[RUNNING, KeyboardInterrupt(), COMPLETED])
    with pytest.raises(KeyboardInterrupt):
        bench.drive(bench.run("a"))
    (token,) = bench.scheduler._tokens
    with contextlib.closing(sqlite3.connect(bench.path, isolation_level=None)) as db:
        db.execute("UPDATE attempts SET token = ?", (damaged,))
    assert _go_on(bench).verdict == "success"
    assert len(bench.scheduler.submissions) == 1
    assert [attempt.token for attempt in bench.entries()[KEY].attempts] == [token]


def test_without_a_journal_the_job_of_an_earlier_attempt_is_looked_for(bench: Any) -> None:
    """It never started, its attempt was given up, and another one was submitted: the journal knew its id."""
    bench.script(a=[JobStatus("NEVER_STARTED", JobClass.UNKNOWN)])
    started: list[Any] = [COMPLETED]
    look = bench.scheduler._answer
    bench.scheduler._answer = lambda job_id: look(job_id) if job_id == "100" else started[0]
    bench.drive(bench.run("a"), unknown_s=5.0)
    assert bench.verdicts() == {KEY: "success"}
    bench.path.unlink()
    bench.scheduler.cancelled.clear()
    _go_on(bench)
    assert bench.scheduler.cancelled == ["100"]
    assert bench.verdicts() == {KEY: "success"}


def test_a_job_that_was_given_up_is_cancelled_if_it_runs(bench: Any) -> None:
    """Slurm had forgotten it for a while."""
    bench.script(a=[RUNNING, FORGOTTEN])
    bench.drive(bench.run("a"), unknown_s=5.0)
    assert bench.entries()[KEY].last.status.job_class is JobClass.LOST
    bench.scheduler._looks["100"] = iter([RUNNING] * 10)
    bench.scheduler.cancelled.clear()
    bench.scheduler.ignores_cancel = 2
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"), only_cancel=True)
    assert caught.value.left_running == ""
    assert set(bench.scheduler.cancelled) == {"100"}
    assert bench.verdicts() == {KEY: "failed"}


def test_a_job_that_was_given_up_and_does_not_end_is_named(bench: Any, sentence: Sentence) -> None:
    bench.script(a=[RUNNING, FORGOTTEN])
    bench.drive(bench.run("a"), unknown_s=5.0)
    bench.scheduler._looks["100"] = iter([RUNNING] * 10)
    bench.scheduler.ignores_cancel = 10**6
    with pytest.raises(Paused) as caught:
        bench.drive(bench.run("a"), only_cancel=True, patience_s=30.0)
    sentence(caught)


@pytest.mark.parametrize("state", [intended, submitted, running])
def test_what_is_there_can_be_cancelled(bench: Any, state: Callable[[Journal], None]) -> None:
    _left(bench, state)
    bench.scheduler._looks[JOB] = iter([RUNNING])
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"), bench.run("b"), only_cancel=True)
    assert caught.value.exit_code == 143
    assert bench.scheduler.cancelled == [JOB]
    assert bench.scheduler.submissions == []
    assert bench.states() == {KEY: ["INTERRUPTED"], "b/0/0": []}


def test_there_may_be_nothing_to_cancel(bench: Any) -> None:
    _left(bench, ended_as(COMPLETED), lambda journal: journal.decided(KEY, "success", []))
    assert _go_on(bench, only_cancel=True).verdict == "success"


def test_excluded_nodes_stay_excluded(bench: Any) -> None:
    _left(bench, lambda journal: journal.exclude("n7", "gpu_lost in b/0/0"), job=False)
    _go_on(bench)
    assert bench.scheduler.submissions[0].exclude_nodes == ("n7",)


def test_dependencies_hold_over_processes(bench: Any) -> None:
    _left(bench, running)
    bench.drive(bench.run("b", after_completion=("a",)), bench.run("a"))
    events = bench.scheduler.events
    assert events.index("COMPLETED a") < events.index("submit b")


def test_fail_fast_holds_over_processes(bench: Any) -> None:
    """The failure was seen, and the driver died before it stopped the others."""
    _left(bench, ended_as(FAILED))
    bench.drive(bench.run("a"), bench.run("b"), fail_fast=True)
    assert bench.verdicts() == {KEY: "failed", "b/0/0": "skipped"}
    assert bench.scheduler.submissions == []


def test_fail_fast_holds_after_a_verdict(bench: Any) -> None:
    _left(bench, ended_as(FAILED), lambda journal: journal.decided(KEY, "failed", ["FAILED"]))
    bench.drive(bench.run("a"), bench.run("b"), fail_fast=True)
    assert bench.scheduler.submissions == []


def test_a_failed_pre_test_excludes_its_node_over_processes(bench: Any) -> None:
    check = bench.run("pre_test", is_pre_test=True)
    journal = bench.write(check.key)
    journal.intend([(check.key, 1)], TOKEN)
    journal.submitted(check.key, 1, JOB)
    journal.saw(check.key, 1, FAILED)
    journal.close()
    bench.drive(check, bench.run("a"))
    assert list(bench.excluded()) == ["0"]


def test_a_judged_pre_test_excludes_its_node_over_processes(bench: Any) -> None:
    check = bench.run("pre_test", is_pre_test=True)
    journal = bench.write(check.key)
    journal.intend([(check.key, 1)], TOKEN)
    journal.submitted(check.key, 1, JOB)
    journal.saw(check.key, 1, FAILED)
    journal.decided(check.key, "failed", ["FAILED"])
    journal.close()
    bench.drive(check, bench.run("a"))
    assert list(bench.excluded()) == ["0"]


def test_an_interrupted_pre_test_says_nothing_about_its_node(bench: Any) -> None:
    check, run = bench.run("pre_test", is_pre_test=True), bench.run("a")
    bench.script(pre_test=[[RUNNING, signal.SIGTERM], [COMPLETED]])
    with pytest.raises(Interrupted):
        bench.drive(check, run)
    assert bench.excluded() == {}
    bench.drive(check, run)
    assert bench.excluded() == {}
    assert bench.verdicts() == {check.key: "success", run.key: "success"}
