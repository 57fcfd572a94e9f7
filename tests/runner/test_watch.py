"""Runs are submitted in order and brought to their end, whatever single ones of them do."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.jobs import JobClass, JobStatus, SubmitRefused
from cloudai_mbridge.plan import RunPlan, SweepPlan
from cloudai_mbridge.runner import Journal, run_all, watch
from cloudai_mbridge.runner.interrupt import Interrupted

PENDING = JobStatus("PENDING", JobClass.ACTIVE)
RUNNING = JobStatus("RUNNING", JobClass.ACTIVE)
COMPLETED = JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0)
FAILED = JobStatus("FAILED", JobClass.FAILED, exit_code=1)
CANCELLED = JobStatus("CANCELLED", JobClass.CANCELLED)
SILENT = ToolFailure("squeue failed: Unable to contact slurm controller")
Answer = JobStatus | BaseException | signal.Signals


class FakeScheduler:
    """A scheduler that follows a script: what each look at a job of a test shows.

    A signal in the script comes while the scheduler is being asked, an exception is its answer.
    """

    def __init__(self, **script: list[Answer]) -> None:
        self._script = script
        self._looks: dict[str, Iterator[Answer]] = {}
        self._test_of: dict[str, str] = {}
        self.refuse: dict[str, BaseException] = {}
        self.signal_at: str | None = None
        self.events: list[str] = []
        self.cancelled: list[str] = []
        self.ignores_cancel = 0

    def preflight(self) -> None:
        """Nothing to check."""

    def submit(self, plan: RunPlan, directory: Path) -> str:
        if error := self.refuse.pop(plan.test_id, None):
            self.events.append(f"refuse {plan.test_id}")
            raise error
        self.events.append(f"submit {plan.test_id}")
        job_id = str(100 + len(self._test_of))
        self._test_of[job_id] = plan.test_id
        self._looks[job_id] = iter(self._script.get(plan.test_id, [RUNNING, COMPLETED]))
        if plan.test_id == self.signal_at:
            signal.raise_signal(signal.SIGINT)
        assert directory.parts[-1] == "0"
        return job_id

    def poll(self, jobs: Mapping[str, Path]) -> dict[str, JobStatus]:
        seen: dict[str, JobStatus] = {}
        for job_id in jobs:
            if job_id in self.cancelled:
                self.ignores_cancel -= 1
                answer: Answer = RUNNING if self.ignores_cancel >= 0 else CANCELLED
            else:
                answer = next(self._looks[job_id])
            if isinstance(answer, signal.Signals):
                signal.raise_signal(answer)
                answer = RUNNING
            if isinstance(answer, BaseException):
                raise answer
            seen[job_id] = answer
            self.events.append(f"{answer.state} {self._test_of[job_id]}")
        return seen

    def cancel(self, job_ids: Iterable[str]) -> None:
        self.cancelled += job_ids
        self.events.append(f"cancel {len(self.cancelled)}")


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.notices: list[str] = []

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        self.seen.append(f"{run.test_id} {status.state}")

    def notice(self, text: str) -> None:
        self.notices.append(text)


def _run(test_id: str, point: int = 0, **keys: Any) -> RunPlan:
    return RunPlan(
        key=f"{test_id}/{point}/0",
        test_id=test_id,
        test_name="t",
        label=str(point),
        iteration=0,
        coordinates={},
        args={},
        recipe="gpt_tiny",
        num_nodes=1,
        ranks_per_node=1,
        num_steps=1,
        warmup_steps=0,
        training_config={},
        definition={},
        env={},
        secret_env={},
        **keys,
    )


Sweep = Callable[..., Notes]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    yield journal
    journal.close()


@pytest.fixture
def sweep(tmp_path: Path, journal: Journal) -> Sweep:
    """Run a plan to its end with a scheduler, without waiting between the looks."""

    def run(scheduler: FakeScheduler, *runs: RunPlan, max_parallel: int = 99) -> Notes:
        notes = Notes()
        journal.plan(r.key for r in runs)
        run_all(
            SweepPlan("s", "fake", runs, ()),
            tmp_path,
            scheduler,
            journal,
            notes,
            max_parallel=max_parallel,
            interval_s=0.0,
        )
        return notes

    return run


def _final_states(journal: Journal) -> dict[str, str | None]:
    return {key: entry.status.state if entry.status else None for key, entry in journal.entries().items()}


def test_runs_one_after_the_other(sweep: Sweep, journal: Journal) -> None:
    scheduler = FakeScheduler()
    sweep(scheduler, _run("a"), _run("b"), max_parallel=1)
    assert scheduler.events == [
        *("submit a", "RUNNING a", "COMPLETED a"),
        *("submit b", "RUNNING b", "COMPLETED b"),
    ]
    assert _final_states(journal) == {"a/0/0": "COMPLETED", "b/0/0": "COMPLETED"}
    assert [entry.job_id for entry in journal.entries().values()] == ["100", "101"]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_never_more_than_the_limit_are_active(sweep: Sweep, limit: int) -> None:
    scheduler = FakeScheduler()
    sweep(scheduler, *(_run("a", i) for i in range(6)), max_parallel=limit)
    active = most = 0
    for event in scheduler.events:
        active += event.startswith("submit") - event.startswith("COMPLETED")
        most = max(most, active)
    assert (active, most) == (0, limit)


def test_all_active_jobs_are_asked_for_at_once(sweep: Sweep) -> None:
    scheduler = FakeScheduler()
    sweep(scheduler, _run("a"), _run("b"))
    assert scheduler.events[:4] == ["submit a", "submit b", "RUNNING a", "RUNNING b"]


def test_a_failed_run_does_not_stop_the_others(sweep: Sweep, journal: Journal) -> None:
    sweep(FakeScheduler(a=[FAILED]), _run("a"), _run("b"), max_parallel=1)
    assert _final_states(journal) == {"a/0/0": "FAILED", "b/0/0": "COMPLETED"}


def test_a_refused_submission_does_not_stop_the_others(sweep: Sweep, journal: Journal) -> None:
    scheduler = FakeScheduler()
    scheduler.refuse["a"] = SubmitRefused("invalid partition specified: x")
    notes = sweep(scheduler, _run("a"), _run("b"))
    assert _final_states(journal) == {"a/0/0": "REFUSED", "b/0/0": "COMPLETED"}
    entry = journal.entries()["a/0/0"]
    assert entry.job_id is None
    assert entry.status is not None
    assert entry.status.job_class is JobClass.FAILED
    assert "invalid partition specified: x" in entry.status.reason
    assert "a REFUSED" in notes.seen


def test_after_the_end_of_another_test(sweep: Sweep) -> None:
    scheduler = FakeScheduler(a=[PENDING, RUNNING, FAILED])
    sweep(scheduler, _run("b", after_completion=("a",)), _run("a"))
    assert scheduler.events == [
        *("submit a", "PENDING a", "RUNNING a", "FAILED a"),
        *("submit b", "RUNNING b", "COMPLETED b"),
    ]


def test_after_the_end_means_the_end_of_all_its_points(sweep: Sweep) -> None:
    scheduler = FakeScheduler()
    sweep(scheduler, _run("b", after_completion=("a",)), _run("a", 0), _run("a", 1), max_parallel=1)
    assert [event for event in scheduler.events if event.startswith("submit")] == ["submit a", "submit a", "submit b"]


def test_after_the_start_of_another_test(sweep: Sweep) -> None:
    scheduler = FakeScheduler(a=[PENDING, PENDING, RUNNING, RUNNING, COMPLETED])
    sweep(scheduler, _run("a"), _run("b", after_start=("a",)))
    assert scheduler.events.index("submit b") == scheduler.events.index("RUNNING a") + 1
    assert scheduler.events.index("submit b") < scheduler.events.index("COMPLETED a")


@pytest.mark.parametrize("kind", ["after_start", "after_completion"])
def test_a_test_that_was_refused_holds_nobody_up(sweep: Sweep, journal: Journal, kind: str) -> None:
    scheduler = FakeScheduler()
    scheduler.refuse["a"] = SubmitRefused("no")
    sweep(scheduler, _run("a"), _run("b", **{kind: ("a",)}))
    assert _final_states(journal)["b/0/0"] == "COMPLETED"


@pytest.mark.parametrize("kind", ["after_start", "after_completion"])
def test_a_test_without_runs_holds_nobody_up(sweep: Sweep, journal: Journal, kind: str) -> None:
    """All of its points broke a rule."""
    sweep(FakeScheduler(), _run("b", **{kind: ("rejected",)}))
    assert _final_states(journal) == {"b/0/0": "COMPLETED"}


def test_a_job_that_ends_before_it_was_seen_running_has_started(sweep: Sweep, journal: Journal) -> None:
    sweep(FakeScheduler(a=[CANCELLED]), _run("a"), _run("b", after_start=("a",)))
    assert _final_states(journal) == {"a/0/0": "CANCELLED", "b/0/0": "COMPLETED"}


def test_a_job_in_an_unknown_state_is_not_waited_for(sweep: Sweep, journal: Journal) -> None:
    sweep(FakeScheduler(a=[JobStatus("FORGOTTEN", JobClass.UNKNOWN)]), _run("a"))
    assert _final_states(journal) == {"a/0/0": "FORGOTTEN"}


def test_a_scheduler_that_is_silent_for_a_while(sweep: Sweep, journal: Journal) -> None:
    notes = sweep(FakeScheduler(a=[RUNNING, SILENT, SILENT, SILENT, RUNNING, COMPLETED]), _run("a"))
    assert _final_states(journal) == {"a/0/0": "COMPLETED"}
    assert notes.notices == [f"{SILENT}; asking again"]


def test_two_silences_are_two_notices(sweep: Sweep) -> None:
    notes = sweep(FakeScheduler(a=[SILENT, RUNNING, SILENT, COMPLETED]), _run("a"))
    assert len(notes.notices) == 2


def test_patience_ends(sweep: Sweep, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.01)
    script: list[Answer] = [RUNNING, *[SILENT] * 10**6]
    with pytest.raises(ToolFailure, match=r"Unable to contact slurm controller; gave up after .*may still run: 100"):
        sweep(FakeScheduler(a=script), _run("a"))
    assert _final_states(journal) == {"a/0/0": "RUNNING"}


def test_a_scheduler_that_is_silent_at_a_submission_does_not_lose_the_active_jobs(sweep: Sweep) -> None:
    """It may be borne like silence at a look, or end the sweep; but then the jobs that still run must be named."""
    scheduler = FakeScheduler(a=[RUNNING, COMPLETED])
    scheduler.refuse["b"] = ToolFailure("sbatch did not answer within 60 s")
    failure = ""
    try:
        sweep(scheduler, _run("a"), _run("b"))
    except ToolFailure as error:
        failure = str(error)
    assert "100" in failure or scheduler.events[-1] == "COMPLETED b"


def test_an_interrupt_cancels_and_waits(sweep: Sweep, journal: Journal) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    scheduler = FakeScheduler(a=[RUNNING, RUNNING], b=[RUNNING, signal.SIGTERM])
    scheduler.ignores_cancel = 3
    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        sweep(scheduler, _run("a"), _run("b"), _run("c"), max_parallel=2)
    assert caught.value.exit_code == 143
    assert sorted(scheduler.cancelled) == ["100", "101"]
    assert _final_states(journal) == {"a/0/0": "CANCELLED", "b/0/0": "CANCELLED", "c/0/0": None}
    assert "submit c" not in scheduler.events
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_interrupt_during_a_submission_loses_no_job(sweep: Sweep, journal: Journal) -> None:
    scheduler = FakeScheduler()
    scheduler.signal_at = "b"
    with pytest.raises(Interrupted) as caught:
        sweep(scheduler, _run("a"), _run("b"), _run("c"))
    assert caught.value.exit_code == 130
    assert scheduler.cancelled == ["100", "101"]
    assert _final_states(journal) == {"a/0/0": "CANCELLED", "b/0/0": "CANCELLED", "c/0/0": None}


def test_an_interrupt_is_not_slept_through(sweep: Sweep, tmp_path: Path, journal: Journal) -> None:
    run = _run("a")
    journal.plan([run.key])
    started = time.monotonic()
    with pytest.raises(Interrupted):
        run_all(
            SweepPlan("s", "fake", (run,), ()),
            tmp_path,
            FakeScheduler(a=[signal.SIGINT]),
            journal,
            Notes(),
            max_parallel=1,
            interval_s=60.0,
        )
    assert time.monotonic() - started < 5


def test_a_cancel_that_fails_is_still_reported_as_an_interrupt(sweep: Sweep) -> None:
    """scancel may be silent too: the exit code says that a signal came, and the jobs that may run are named."""
    scheduler = FakeScheduler(a=[signal.SIGTERM, RUNNING])
    scheduler.cancel = _fail  # type: ignore[method-assign]
    with pytest.raises((Interrupted, ToolFailure)) as caught:
        sweep(scheduler, _run("a"))
    assert isinstance(caught.value, Interrupted) or "100" in str(caught.value)


def _fail(job_ids: Iterable[str]) -> None:
    raise ToolFailure("scancel did not answer within 60 s")


def test_an_empty_plan_ends_at_once(sweep: Sweep) -> None:
    assert sweep(FakeScheduler()).seen == []
