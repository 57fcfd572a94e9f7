"""Runs are submitted in order and brought to their end, whatever single ones of them do."""

import os
import signal
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, Paused, ToolFailure
from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.runner import Pace
from cloudai_mbridge.runner.interrupt import Interrupted
from cloudai_mbridge.runner.journal import JournalEntry
from cloudai_mbridge.runner.lock import driver_lock, is_cancel_requested, request_cancel
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus, SubmitRefused
from cloudai_mbridge.verdict import Judgement
from tests.golden import Sentence
from tests.runner.conftest import COMPLETED, PENDING, RUNNING, Bench

FAILED = JobStatus("FAILED", JobClass.FAILED, exit_code=1, nodes="n1", run_time_s=60.0)
CANCELLED = JobStatus("CANCELLED", JobClass.CANCELLED, signal=15, run_time_s=60.0)
SILENT = ToolFailure("squeue failed: Unable to contact slurm controller")


def test_runs_one_after_the_other(bench: Any) -> None:
    bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert bench.scheduler.events == [
        *("submit a", "RUNNING a", "COMPLETED a"),
        *("submit b", "RUNNING b", "COMPLETED b"),
    ]
    assert bench.states() == {"a/0/0": ["COMPLETED"], "b/0/0": ["COMPLETED"]}
    assert bench.verdicts() == {"a/0/0": "success", "b/0/0": "success"}
    assert [entry.last.job_id for entry in bench.entries().values()] == ["100", "101"]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_never_more_than_the_limit_are_active(bench: Any, limit: int) -> None:
    bench.drive(*(bench.run("a", i) for i in range(6)), max_parallel=limit)
    active = most = 0
    for event in bench.scheduler.events:
        active += event.startswith("submit") - event.startswith("COMPLETED")
        most = max(most, active)
    assert (active, most) == (0, limit)


def test_all_active_jobs_are_asked_for_at_once(bench: Any) -> None:
    bench.drive(bench.run("a"), bench.run("b"))
    assert bench.scheduler.events[:4] == ["submit a", "submit b", "RUNNING a", "RUNNING b"]


def test_every_submission_has_a_token_of_its_own(bench: Any) -> None:
    bench.drive(*(bench.run("a", i) for i in range(5)))
    tokens = [submission.token for submission in bench.scheduler.submissions]
    assert len(set(tokens)) == 5
    assert all(len(token) >= 16 for token in tokens)
    assert [entry.last.token for entry in bench.entries().values()] == tokens


def test_the_intent_is_on_disk_before_the_submission(bench: Any) -> None:
    submit, seen = bench.scheduler.submit, []

    def look(submission: Any, root: Any) -> Any:
        seen.append([(entry.last.token, entry.last.job_id) for entry in bench.entries().values()])
        return submit(submission, root)

    bench.scheduler.submit = look
    bench.drive(bench.run("a"))
    (submission,) = bench.scheduler.submissions
    assert seen == [[(submission.token, None)]]


def test_a_failed_run_does_not_stop_the_others(bench: Any) -> None:
    bench.script(a=[FAILED])
    bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert bench.states() == {"a/0/0": ["FAILED"], "b/0/0": ["COMPLETED"]}
    assert bench.verdicts() == {"a/0/0": "failed", "b/0/0": "success"}


def test_a_refused_submission_does_not_stop_the_others(bench: Any) -> None:
    bench.scheduler.refuse["a"] = [SubmitRefused("invalid partition specified: x")]
    notes = bench.drive(bench.run("a"), bench.run("b"))
    assert bench.states() == {"a/0/0": ["REFUSED"], "b/0/0": ["COMPLETED"]}
    last = bench.entries()["a/0/0"].last
    assert last.job_id is None
    assert last.status.job_class is JobClass.FAILED
    assert "invalid partition specified: x" in last.status.reason
    assert "a REFUSED" in notes.seen
    assert bench.tests("refuse") == ["a"]


def test_an_empty_plan_ends_at_once(bench: Any) -> None:
    assert bench.drive().seen == []


# Order


def test_after_the_end_of_another_test(bench: Any) -> None:
    bench.script(a=[PENDING, RUNNING, FAILED])
    bench.drive(bench.run("b", after_completion=("a",)), bench.run("a"))
    assert bench.scheduler.events == [
        *("submit a", "PENDING a", "RUNNING a", "FAILED a"),
        *("submit b", "RUNNING b", "COMPLETED b"),
    ]


def test_after_the_end_means_the_end_of_all_its_points(bench: Any) -> None:
    bench.drive(bench.run("b", after_completion=("a",)), bench.run("a", 0), bench.run("a", 1), max_parallel=1)
    assert bench.tests("submit") == ["a", "a", "b"]


def test_after_the_end_means_the_end_of_all_its_attempts(bench: Any) -> None:
    bench.script(a=[[JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE)], [RUNNING, COMPLETED]])
    bench.drive(bench.run("b", after_completion=("a",)), bench.run("a"))
    assert bench.tests("submit") == ["a", "a", "b"]


def test_after_the_start_of_another_test(bench: Any) -> None:
    bench.script(a=[PENDING, PENDING, RUNNING, RUNNING, COMPLETED])
    bench.drive(bench.run("a"), bench.run("b", after_start=("a",)))
    events = bench.scheduler.events
    assert events.index("submit b") == events.index("RUNNING a") + 1
    assert events.index("submit b") < events.index("COMPLETED a")


@pytest.mark.parametrize("kind", ["after_start", "after_completion", "end_with"])
def test_a_test_without_a_job_holds_nobody_up(bench: Any, kind: str) -> None:
    """It was refused, or has no runs, since all of its points broke a rule."""
    bench.scheduler.refuse["a"] = [SubmitRefused("no")]
    second = bench.run("b", **({} if kind == "end_with" else {kind: ("a",)}))
    bench.drive(bench.run("a"), second, bench.run("c", **{kind: ("rejected",)}))
    assert bench.states() == {"a/0/0": ["REFUSED"], "b/0/0": ["COMPLETED"], "c/0/0": ["COMPLETED"]}


def test_a_job_that_ends_before_it_was_seen_running_has_started(bench: Any) -> None:
    bench.script(a=[CANCELLED])
    bench.drive(bench.run("a"), bench.run("b", after_start=("a",)))
    assert bench.states() == {"a/0/0": ["CANCELLED"], "b/0/0": ["COMPLETED"]}


def test_a_test_that_ends_with_another_is_stopped(bench: Any, sentence: Sentence) -> None:
    bench.script(server=[RUNNING], client=[RUNNING, RUNNING, COMPLETED])
    bench.drive(bench.run("server", end_with=("client",)), bench.run("client"))
    assert bench.states() == {"server/0/0": ["STOPPED"], "client/0/0": ["COMPLETED"]}
    last = bench.entries()["server/0/0"].last
    assert last.status.job_class is JobClass.STOPPED
    sentence(last.status.reason)
    assert bench.verdicts()["server/0/0"] == "success"  # as this judge says: it was to be stopped


def test_a_test_that_has_ended_by_itself_is_not_stopped(bench: Any) -> None:
    bench.script(server=[RUNNING, COMPLETED], client=[RUNNING, RUNNING, RUNNING, COMPLETED])
    bench.drive(bench.run("server", end_with=("client",)), bench.run("client"))
    assert bench.states()["server/0/0"] == ["COMPLETED"]
    assert bench.scheduler.cancelled == []


def test_a_success_in_the_last_moment_counts(bench: Any) -> None:
    """It was being cancelled, and had come to its good end before that."""
    bench.scheduler.cancel = lambda ids: None
    bench.script(server=[RUNNING, RUNNING, COMPLETED], client=[RUNNING, COMPLETED])
    bench.drive(bench.run("server", end_with=("client",)), bench.run("client"))
    assert bench.states()["server/0/0"] == ["COMPLETED"]


def test_a_test_that_did_not_get_its_turn_is_skipped(bench: Any, sentence: Sentence) -> None:
    notes = bench.drive(bench.run("client"), bench.run("server", end_with=("client",)), max_parallel=1)
    entry = bench.entries()["server/0/0"]
    assert (entry.verdict, entry.attempts) == ("skipped", ())
    sentence(entry.reasons[0])
    assert "server SKIPPED" in notes.seen


def test_all_of_a_test_must_have_ended_to_end_another(bench: Any) -> None:
    bench.script(**{"server": [RUNNING], "client/1/0": [RUNNING] * 5 + [COMPLETED]})
    bench.drive(bench.run("server", end_with=("client",)), bench.run("client", 0), bench.run("client", 1))
    events = bench.scheduler.events
    assert max(i for i, event in enumerate(events) if event == "COMPLETED client") < events.index("cancel 1")


# Nodes are checked first


def _checked(bench: Any, *runs: Any, **config: Any) -> Any:
    checks = [bench.run("pre_test", i, is_pre_test=True) for i in (1, 2)]
    return bench.drive(*checks, *runs, **config)


def test_nothing_starts_before_every_node_is_checked(bench: Any) -> None:
    bench.script(**{"pre_test/1/0": [RUNNING] * 4 + [COMPLETED]})
    _checked(bench, bench.run("a"))
    events = bench.scheduler.events
    last_check = max(i for i, event in enumerate(events) if event == "COMPLETED pre_test")
    assert last_check < events.index("submit a")
    assert bench.verdicts() == dict.fromkeys(("pre_test/1/0", "pre_test/2/0", "a/0/0"), "success")


def test_a_node_that_fails_its_check_is_excluded(bench: Any) -> None:
    bench.script(**{"pre_test/1/0": [FAILED]})
    _checked(bench, bench.run("a"))
    assert set(bench.excluded()) == {"1"}  # the run's label is the node's name
    assert "pre_test failed: FAILED" in bench.excluded()["1"]
    assert bench.scheduler.submissions[-1].exclude_nodes == ("1",)
    assert bench.verdicts()["a/0/0"] == "success"


def test_a_hook_that_fails_stops_everything(bench: Any) -> None:
    bench.script(**{"hook/0/0": [FAILED]})
    bench.drive(bench.run("hook", is_gate=True), bench.run("a"))
    assert bench.tests("submit") == ["hook"]
    assert bench.verdicts() == {"hook/0/0": "failed", "a/0/0": "skipped"}


def test_after_a_hook_everything_starts(bench: Any) -> None:
    bench.drive(bench.run("hook", is_gate=True), bench.run("a"))
    assert bench.tests("submit") == ["hook", "a"]


def test_a_check_is_not_tried_again(bench: Any) -> None:
    bench.script(**{"pre_test/1/0": [JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE)]})
    _checked(bench, bench.run("a"), retries=2)
    assert bench.tests("submit") == ["pre_test", "pre_test", "a"]
    assert "1" in bench.excluded()


def test_a_check_that_does_not_end_is_ended(bench: Any) -> None:
    bench.script(**{"pre_test/1/0": [RUNNING]})
    _checked(bench, bench.run("a"), pre_test_timeout_s=300.0)
    assert bench.states()["pre_test/1/0"] == ["PRE_TEST_TIMEOUT"]
    assert "1" in bench.excluded()
    assert 300 < bench.clock.now - 1000 < 400


def test_without_nodes_nothing_runs(bench: Any, sentence: Sentence) -> None:
    bench.script(pre_test=[FAILED])
    bench.scheduler.usable = 2
    _checked(bench, bench.run("a"))
    assert bench.tests("submit") == ["pre_test", "pre_test"]
    entry = bench.entries()["a/0/0"]
    assert entry.verdict == "skipped"
    sentence(entry.reasons[0])
    assert "pre_test" in entry.reasons[0]


def test_a_check_that_fails_does_not_fail_fast(bench: Any) -> None:
    bench.script(**{"pre_test/1/0": [FAILED]})
    _checked(bench, bench.run("a"), fail_fast=True)
    assert bench.verdicts()["a/0/0"] == "success"


# Fail fast


def test_the_first_failure_ends_everything(bench: Any, sentence: Sentence) -> None:
    bench.script(a=[RUNNING, FAILED], b=[RUNNING])
    bench.drive(bench.run("a"), bench.run("b"), bench.run("c"), max_parallel=2, fail_fast=True)
    assert bench.states() == {"a/0/0": ["FAILED"], "b/0/0": ["CANCELLED"], "c/0/0": []}
    assert bench.verdicts() == {"a/0/0": "failed", "b/0/0": "failed", "c/0/0": "skipped"}
    assert bench.entries()["c/0/0"].reasons == ("fail_fast: a/0/0 failed",)
    sentence(bench.entries()["b/0/0"].last.status.reason)
    assert "submit c" not in bench.scheduler.events


def test_a_failure_that_is_tried_again_ends_nothing(bench: Any) -> None:
    bench.script(a=[[JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE)], [RUNNING, COMPLETED]])
    bench.drive(bench.run("a"), bench.run("b"), fail_fast=True)
    assert bench.verdicts() == {"a/0/0": "success", "b/0/0": "success"}


def test_after_the_first_failure_nothing_is_submitted_again(bench: Any) -> None:
    """The infrastructure fails a run while everything is being cancelled."""
    bench.script(a=[RUNNING, FAILED], b=[RUNNING, JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE)])
    bench.drive(bench.run("a"), bench.run("b"), fail_fast=True)
    assert bench.tests("submit") == ["a", "b"]
    assert bench.verdicts() == {"a/0/0": "failed", "b/0/0": "failed"}


# A scheduler that does not answer


def test_a_scheduler_that_is_silent_for_a_while(bench: Any) -> None:
    bench.script(a=[RUNNING, SILENT, SILENT, SILENT, RUNNING, COMPLETED])
    notes = bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["COMPLETED"]}
    assert notes.notices == [f"{SILENT}; asking again", "the scheduler answers again"]


def test_two_silences_are_two_notices(bench: Any) -> None:
    bench.script(a=[SILENT, RUNNING, SILENT, COMPLETED])
    assert sum("asking again" in notice for notice in bench.drive(bench.run("a")).notices) == 2


def test_patience_ends(bench: Any) -> None:
    bench.script(a=[RUNNING, SILENT])
    with pytest.raises(Paused) as caught:
        bench.drive(bench.run("a"), bench.run("b"), max_parallel=1, patience_s=600.0)
    assert caught.value.exit_code == 4
    for part in ("Unable to contact slurm controller", "paused after 600 s", "may still run: 100", str(bench.root)):
        assert part in str(caught.value)
    assert bench.states() == {"a/0/0": ["RUNNING"], "b/0/0": []}
    assert 600 < bench.clock.now - 1000 < 650
    assert bench.scheduler.cancelled == []


def test_what_was_paused_is_taken_up(bench: Any) -> None:
    bench.script(a=[RUNNING, SILENT])
    with pytest.raises(Paused):
        bench.drive(bench.run("a"), bench.run("b"), max_parallel=1, patience_s=600.0)
    bench.scheduler._looks["100"] = iter([RUNNING, COMPLETED])
    bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert bench.states() == {"a/0/0": ["COMPLETED"], "b/0/0": ["COMPLETED"]}
    assert bench.tests("submit") == ["a", "b"]


def test_a_defect_of_the_tool_names_the_jobs(bench: Any) -> None:
    bench.script(a=[RUNNING, ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        bench.drive(bench.run("a"))
    assert any("may still run: 100" in notice for notice in bench.notes.notices)


# Signals


def test_an_interrupt_cancels_and_waits(bench: Any) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    bench.script(a=[RUNNING, RUNNING], b=[RUNNING, signal.SIGTERM])
    bench.scheduler.ignores_cancel = 3
    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        bench.drive(bench.run("a"), bench.run("b"), bench.run("c"), max_parallel=2)
    assert caught.value.exit_code == 143
    assert caught.value.left_running == ""
    assert sorted(set(bench.scheduler.cancelled)) == ["100", "101"]
    assert bench.states() == {"a/0/0": ["INTERRUPTED"], "b/0/0": ["INTERRUPTED"], "c/0/0": []}
    assert all(
        entry.last.status.job_class is JobClass.CANCELLED for entry in bench.entries().values() if entry.attempts
    )
    assert "submit c" not in bench.scheduler.events
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_interrupt_during_a_submission_loses_no_job(bench: Any) -> None:
    bench.scheduler.signal_at = "b"
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"), bench.run("b"), bench.run("c"))
    assert caught.value.exit_code == 130
    assert bench.scheduler.cancelled == ["100", "101"]
    assert bench.states() == {"a/0/0": ["INTERRUPTED"], "b/0/0": ["INTERRUPTED"], "c/0/0": []}


def test_an_interrupt_is_not_slept_through(bench: Any) -> None:
    bench.script(a=[signal.SIGINT])
    with pytest.raises(Interrupted):
        bench.drive(bench.run("a"), pace=Pace(3600.0, 3600.0, bench.clock))
    assert bench.clock.now - 1000 < 5


def test_a_run_that_waits_for_a_place_starts_when_another_has_ended(bench: Any) -> None:
    """Not an interval later; and it is polled at once, so that no signal comes between its submission and a look."""
    bench.script(a=[RUNNING, COMPLETED], b=[RUNNING, COMPLETED])
    bench.drive(bench.run("a"), bench.run("b"), max_parallel=1, pace=Pace(60.0, 60.0, bench.clock))
    assert bench.tests("submit") == ["a", "b"]
    assert bench.clock.now - 1000 < 2.5 * 60  # two intervals: each run was seen running, then ended


def test_a_run_whose_turn_has_not_come_is_not_asked_for_at_once(bench: Any) -> None:
    """Only what may be submitted saves an interval: a poll is work for the controller."""
    bench.script(a=[COMPLETED], b=[RUNNING, COMPLETED])
    later = bench.run("c", after_completion=("b",))
    bench.drive(bench.run("a"), bench.run("b"), later, pace=Pace(60.0, 60.0, bench.clock))
    assert bench.clock.now - 1000 > 0.8 * 60


def test_a_second_interrupt_does_not_wait(bench: Any, sentence: Sentence) -> None:
    """The jobs whose end nobody has seen are named."""
    bench.scheduler.cancel = lambda job_ids: None
    bench.script(a=[RUNNING, signal.SIGINT, RUNNING, signal.SIGINT], b=[RUNNING])
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"), bench.run("b"))
    assert caught.value.exit_code == 130
    assert caught.value.left_running == "100, 101"
    sentence(caught)
    assert {key: entry.last.ending.state for key, entry in bench.entries().items()} == {
        "a/0/0": "INTERRUPTED",
        "b/0/0": "INTERRUPTED",
    }


def test_two_interrupts_at_once_do_not_wait_either(bench: Any) -> None:
    def twice(submission: Any, root: Any) -> Any:
        ids = submit(submission, root)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return ids

    submit, bench.scheduler.submit = bench.scheduler.submit, twice
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"))
    assert (caught.value.exit_code, caught.value.left_running) == (130, "100")
    assert bench.scheduler.cancelled == ["100"]


def test_a_cancel_without_effect_is_never_an_interrupted_run(bench: Any, sentence: Sentence) -> None:
    """scancel succeeds and the job goes on: what `resume` would submit again might train twice."""
    bench.script(a=[[signal.SIGTERM, RUNNING], [RUNNING, COMPLETED]])
    bench.scheduler.ignores_cancel = 10**6
    with pytest.raises(Paused) as caught:
        bench.drive(bench.run("a"), patience_s=60.0)
    sentence(caught)
    assert bench.states() == {"a/0/0": ["RUNNING"]}
    bench.scheduler.ignores_cancel = 2  # the resumed driver sees its end
    bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["INTERRUPTED", "COMPLETED"]}


def test_one_cut_answer_does_not_give_up_a_job_that_is_being_cancelled(bench: Any) -> None:
    """It has been ending for longer than an unknown state is borne; that its state is unknown is new."""
    forgotten = JobStatus("FORGOTTEN", JobClass.UNKNOWN)
    bench.script(a=[signal.SIGTERM])
    looks = iter([RUNNING] * 60 + [forgotten] + [RUNNING] * 10)
    bench.scheduler._answer = lambda job_id: signal.SIGTERM if not bench.scheduler.cancelled else next(looks, CANCELLED)
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"), unknown_s=5.0, patience_s=600.0)
    assert caught.value.left_running == ""
    assert bench.states() == {"a/0/0": ["INTERRUPTED"]}


def test_an_interrupted_job_that_was_forgotten_is_not_submitted_again(bench: Any) -> None:
    """It has started; nothing says that it does not train on."""
    forgotten = JobStatus("FORGOTTEN", JobClass.UNKNOWN)
    bench.script(a=[signal.SIGTERM])
    bench.scheduler.cancel_error = [ToolFailure("no answer")] * 10**6
    bench.scheduler.script["a"] += [forgotten]
    with pytest.raises(Interrupted):
        bench.drive(bench.run("a"), unknown_s=5.0, patience_s=60.0)
    bench.drive(bench.run("a"))
    assert bench.states() == {"a/0/0": ["FORGOTTEN"]}
    assert bench.verdicts() == {"a/0/0": "failed"}


def test_a_job_that_has_begun_and_then_vanished_ends_the_run(bench: Any) -> None:
    """It holds the claim of its attempt and left nothing else."""
    never = JobStatus("NEVER_STARTED", JobClass.UNKNOWN)
    bench.script(a=[never])
    (bench.root / "a/0/0").mkdir(parents=True)
    poll = bench.scheduler.poll

    def claim(jobs: Any) -> Any:
        for job in jobs:
            take_claim(job.directory, job.token, job.job_id)
        return poll(jobs)

    bench.scheduler.poll = claim
    bench.drive(bench.run("a"), unknown_s=5.0)
    assert bench.states() == {"a/0/0": ["FORGOTTEN"]}
    assert bench.verdicts() == {"a/0/0": "failed"}


def test_a_cancel_that_fails_is_tried_again(bench: Any) -> None:
    """scancel may be silent too."""
    bench.script(a=[signal.SIGTERM, RUNNING])
    bench.scheduler.cancel_error = [ToolFailure("scancel did not respond within 60 s")]
    with pytest.raises(Interrupted) as caught:
        bench.drive(bench.run("a"))
    assert caught.value.left_running == ""
    assert bench.scheduler.cancelled == ["100"]


def test_a_cancel_that_keeps_failing_is_a_pause(bench: Any, sentence: Sentence) -> None:
    """An interrupt's exit code means that the jobs have been cancelled; here they may still run."""
    bench.script(a=[signal.SIGTERM, SILENT])
    bench.scheduler.cancel_error = [ToolFailure("scancel did not respond within 60 s")] * 1000
    with pytest.raises(Paused) as caught:
        bench.drive(bench.run("a"), patience_s=60.0)
    sentence(caught)
    assert caught.value.exit_code == 4


def test_a_request_to_cancel_is_as_good_as_a_signal(bench: Any) -> None:
    bench.script(a=[RUNNING])
    scheduler, looks = bench.scheduler, []
    poll = scheduler.poll

    def request(jobs: Any) -> Any:
        looks.append(jobs)
        if len(looks) == 3:
            request_cancel(bench.root)
        return poll(jobs)

    scheduler.poll = request
    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        bench.drive(bench.run("a"), bench.run("b"), max_parallel=1)
    assert caught.value.exit_code == 143
    assert bench.states() == {"a/0/0": ["INTERRUPTED"], "b/0/0": []}
    assert not is_cancel_requested(bench.root)


def test_an_old_request_to_cancel_is_forgotten(bench: Any) -> None:
    request_cancel(bench.root)
    bench.drive(bench.run("a"))
    assert bench.verdicts() == {"a/0/0": "success"}


# Who drives


def test_a_second_driver_is_refused(bench: Any, sentence: Sentence) -> None:
    with driver_lock(bench.root), pytest.raises(BadInput) as caught:
        bench.drive(bench.run("a"))
    sentence(caught)
    assert bench.scheduler.events == []


def test_a_journal_that_is_none(bench: Any) -> None:
    bench.path.write_bytes(b"this is not a database, and it is long enough to be looked at" * 10)
    with pytest.raises((BadInput, ToolFailure), match=r"journal\.sqlite"):
        bench.drive(bench.run("a"))
    assert bench.scheduler.events == []


def test_the_submitting_command_gets_the_lock(bench: Any) -> None:
    bench.drive(bench.run("a"))
    (submission,) = bench.scheduler.submissions
    assert isinstance(submission.keep_open, int)


# Signals while results are noted down


def signalling(bench: Bench, *places: int) -> list[str]:
    """Judge as the bench does, and get a SIGINT during the judgements at these places; return the keys judged."""
    judged: list[str] = []
    judge = bench.judge

    def count(run: RunPlan, entry: JournalEntry) -> Judgement:
        judged.append(run.key)
        if len(judged) in places:
            os.kill(os.getpid(), signal.SIGINT)
        result: Judgement = judge(run, entry)
        return result

    bench.judge = count
    return judged


@pytest.mark.parametrize(("places", "most"), [((30,), 300), ((30, 70), 100)])
def test_a_signal_is_heeded_between_judgements(bench: Bench, places: tuple[int, ...], most: int) -> None:
    """A thousand jobs may end at once. What is not noted down then is noted down later, each once."""
    runs = [bench.run("a", point) for point in range(300)]
    judged = signalling(bench, *places)
    with pytest.raises(Interrupted):
        bench.drive(*runs)
    assert len(judged) <= most
    noted = [key for key, verdict in bench.verdicts().items() if verdict]
    assert len(noted) == (300 if len(places) == 1 else len(noted))
    bench.drive(*runs)
    assert set(bench.verdicts().values()) == {"success"}
    assert {len(states) for states in bench.states().values()} == {1}, "nothing was submitted twice"
