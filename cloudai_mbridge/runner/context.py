"""State shared by all parts of the runner: the runs with their current attempts, the scheduler, and which are next."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cloudai_mbridge.errors import Paused, ToolFailure
from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.runner.journal import Journal, JournalEntry, SubmissionLog
from cloudai_mbridge.runner.journal_file import UNTRIED
from cloudai_mbridge.schedulers.interface import PENDING, Job, JobClass, JobStatus, Scheduler, Submission
from cloudai_mbridge.verdict import Judgement, Verdict


class Phase(StrEnum):
    """Phase of a run. UNSURE: a submission failed in a way that leaves open whether it was made."""

    WAITING = "waiting"
    UNSURE = "unsure"
    ACTIVE = "active"
    ENDED = "ended"


@dataclass
class Tracked:
    """A run with its current attempt, numbered from 1.

    ending: what the attempt will count as when its job, which is being cancelled, has ended. not_before, submitted_at,
    odd_since, unknown_since, late_since: on the monotonic clock. odd_since: since when its job is to end, or is
    hopeless. unknown_since: since when its state is unknown. late_since: since when its job has ended and files are
    missing. num_doubtful: submissions that failed with an unknown error. avoids: node -> the failure because of which
    an attempt could not start there.
    """

    plan: RunPlan
    phase: Phase = Phase.WAITING
    number: int = 0
    num_retries: int = 0
    num_doubtful: int = 0
    token: str = ""
    job_id: str = ""
    status: JobStatus | None = None
    ending: JobStatus | None = None
    not_before: float = 0.0
    submitted_at: float = 0.0
    odd_since: float | None = None
    unknown_since: float | None = None
    late_since: float | None = None
    gpu_s: float = 0.0
    avoids: dict[str, str] = field(default_factory=dict)

    @property
    def has_started(self) -> bool:
        is_running = self.status is not None and self.status.state != PENDING
        return self.phase is Phase.ENDED or (self.phase is Phase.ACTIVE and is_running)

    @property
    def most_gpu_s(self) -> float:
        """GPU seconds that its next, or current, attempt may use."""
        return self.plan.held_gpus * (self.plan.time_limit_s or 0.0)

    def job(self, root: Path) -> Job:
        """Return its current job. root: of the whole run."""
        was_listed = self.status is not None and self.status.is_listed
        return Job(self.plan.key, self.job_id, self.token, root / self.plan.key, self.plan.array_index, was_listed)

    def end_attempt(self, status: JobStatus) -> None:
        """Count what the attempt has used: all of its time limit, if that is unknown."""
        self.status = status
        self.gpu_s += self.most_gpu_s if status.run_time_s is None else self.plan.held_gpus * status.run_time_s


# Judges the last attempt of a run from its files and its job's end: the entry holds the job's last status
Judge = Callable[[RunPlan, JournalEntry], Judgement]


class Observer(Protocol):
    """Receiver of the events of runs."""

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        """Handle a run that was submitted, changed its state, or ended."""

    def decided(self, run: RunPlan, verdict: str, reasons: tuple[str, ...]) -> None:
        """Handle a run's final verdict: it is not retried."""

    def notice(self, text: str) -> None:
        """Handle an event that concerns no single run."""

    def stopping(self) -> None:
        """Handle the start of cancelling every job."""


class RunnerContext:
    """The runs of a plan, from submission to verdict.

    unsure: submissions, by token, that the scheduler may or may not have taken; doubts: its messages about some of
    them, with which they are refused if nothing was submitted. returned: given-up jobs that run. log: of all
    submissions. stop: the status with which active runs end, if everything is to end. has_changed: something has
    happened since it was last set to False.
    """

    def __init__(
        self, plan: ScenarioPlan, root: Path, scheduler: Scheduler, journal: Journal, observer: Observer
    ) -> None:
        self.root, self.scheduler, self.journal, self.observer = root, scheduler, journal, observer
        self.config = plan.runner
        self.runs = [Tracked(run) for run in plan.runs]
        self.by_key = {run.plan.key: run for run in self.runs}
        self.log = SubmissionLog(root)
        self.unsure: dict[str, Submission] = {}
        self.doubts: dict[str, str] = {}
        self.returned: list[str] = []
        self.stop: JobStatus | None = None
        self.has_changed = False
        self._silent_since: float | None = None

    @property
    def is_over(self) -> bool:
        return all(run.phase is Phase.ENDED for run in self.runs)

    def active(self) -> list[Tracked]:
        return [run for run in self.runs if run.phase is Phase.ACTIVE]

    def lost(self) -> list[Tracked]:
        """Return the runs that were given up because the state of their jobs was unknown; those may still run."""
        ended = (run for run in self.runs if run.phase is Phase.ENDED and run.job_id)
        return [run for run in ended if run.status is not None and run.status.job_class is JobClass.LOST]

    def may_still_run(self) -> list[str]:
        """Return the ids of the jobs whose end was not seen."""
        active = [run.job_id for run in self.active()]
        return active + self.returned + [f"a submission as {token}" for token in self.unsure]

    def jobs(self, runs: Iterable[Tracked]) -> list[Job]:
        return [run.job(self.root) for run in runs]

    def adopt(self, run: Tracked, job_id: str) -> None:
        """Follow a job of a run's current attempt instead of the job assumed so far."""
        if run.job_id:
            self.observer.notice(f"{run.plan.key}: its job is {job_id}, not {run.job_id}")
        self.journal.submitted(run.plan.key, run.number, job_id)
        run.phase, run.job_id, run.odd_since, run.unknown_since = Phase.ACTIVE, job_id, None, None
        run.late_since = None
        self.has_changed = True

    def withdraw(self, run: Tracked) -> str | None:
        """Keep every job of a run's current attempt from training; return the job that already trains.

        OSError: the claim cannot be written.
        """
        return take_claim(self.root / run.plan.key, run.token, None)

    def skip(self, runs: Iterable[Tracked], reason: str) -> None:
        """Decide that runs are not submitted, or not again."""
        for run in runs:
            self.has_changed = True
            run.phase = Phase.ENDED
            verdict, note = (Verdict.FAILED, f"not retried: {reason}") if run.number else (Verdict.SKIPPED, "")
            self.journal.decided(run.plan.key, verdict, [reason], note)
            self.observer.saw(run.plan, JobStatus("SKIPPED", JobClass.SKIPPED, reason=reason))

    def leave_untried(self, runs: Iterable[Tracked], reason: str) -> None:
        """Decide that a search does not need runs."""
        with self.journal.transaction():
            for run in runs:
                self.has_changed = True
                run.phase = Phase.ENDED
                self.journal.decided(run.plan.key, UNTRIED, [reason])

    def tolerate(self, error: ToolFailure) -> None:
        """Wait for a scheduler that does not answer, for runner.patience_s at most; then raise Paused."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self.observer.notice(f"{error}; asking again")
            self.journal.note(str(error))
        if now - self._silent_since > self.config.patience_s:
            raise self.pause(str(error))

    def pause(self, why: str) -> Paused:
        """Return the exception that ends this process; its message names the jobs that may still run."""
        jobs = ", ".join(self.may_still_run()) or "nothing"
        text = f"{why}; paused after {self.config.patience_s:g} s; may still run: {jobs}"
        return Paused(f"{text}; continue with: mbridge resume {self.root}")

    def answered(self) -> None:
        """Note that the scheduler has answered."""
        if self._silent_since is not None:
            self._silent_since = None
            self.observer.notice("the scheduler answers again")
            self.journal.note("the scheduler answers again")


# Keys of the waiting runs to submit now, and the reason for the end of the search; "" before its end
Choice = tuple[Collection[str], str]


class Chooser(Protocol):
    """Decides about the runs of one test, again after each change."""

    def choose(self, runs: Sequence[Tracked], entry_of: Callable[[str], JournalEntry]) -> Choice:
        """Return the runs to submit. runs: all of the test, in order. entry_of: the journal's entry of a key."""

    def why_end(self, run: RunPlan, step_times: Sequence[float]) -> str:
        """Return why a run may end early, else "". step_times: seconds, of all steps after the warm-up so far."""


def ready(runs: Sequence[Tracked], now: float) -> list[Tracked]:
    """Return, in order, the waiting runs that wait for nothing any more."""
    # a test whose points were all rejected has no runs, and no test waits for it
    open_tests = {run.plan.test_id for run in runs if run.phase is not Phase.ENDED}
    unstarted = {run.plan.test_id for run in runs if not run.has_started}
    gate_is_open = all(run.phase is Phase.ENDED for run in runs if run.plan.goes_first)
    return [
        run
        for run in runs
        if run.phase is Phase.WAITING
        and now >= run.not_before
        and (gate_is_open or run.plan.goes_first)
        and open_tests.isdisjoint(run.plan.after_completion)
        and unstarted.isdisjoint(run.plan.after_start)
    ]


def past_end_dependency(runs: Sequence[Tracked]) -> list[Tracked]:
    """Return the runs that were to end with a test that has ended."""
    ongoing = [run for run in runs if run.phase is not Phase.ENDED]
    ended = {run.plan.test_id for run in runs} - {run.plan.test_id for run in ongoing}
    return [run for run in ongoing if not ended.isdisjoint(run.plan.end_with)]


def free_slots(runs: Iterable[Tracked], max_parallel: int | None, parallel_of: Mapping[str, int]) -> int | None:
    """Return how many more runs may be active, None for any number.

    parallel_of: token of a submission -> how many of its runs may run at a time.
    """
    if max_parallel is None:
        return None
    tokens = Counter(run.token for run in runs if run.phase in (Phase.ACTIVE, Phase.UNSURE))
    return max_parallel - sum(min(count, parallel_of.get(token, count)) for token, count in tokens.items())


def affordable(runs: Sequence[Tracked], max_gpu_hours: float | None, wanted: Iterable[Tracked]) -> list[Tracked]:
    """Return the first of the wanted runs that the budget allows, at the most that they may use."""
    if max_gpu_hours is None:
        return list(wanted)
    active = (run.most_gpu_s for run in runs if run.phase in (Phase.ACTIVE, Phase.UNSURE))
    left = max_gpu_hours * 3600 - sum(run.gpu_s for run in runs) - sum(active)
    chosen: list[Tracked] = []
    for run in wanted:
        left -= run.most_gpu_s
        if left < 0:
            break
        chosen.append(run)
    return chosen
