"""A run on its way to its end."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.runner.journal.journal import JournalEntry
from cloudai_mbridge.schedulers.interface import NEVER_STARTED, SUBMITTED, Job, JobStatus

FAILED = "failed"
SKIPPED = "skipped"


class Phase(StrEnum):
    """Where a run stands. UNSURE: a submission failed in a way that leaves open whether it was made."""

    WAITING = "waiting"
    UNSURE = "unsure"
    ACTIVE = "active"
    ENDED = "ended"


@dataclass
class Tracked:
    """A run with its current attempt, numbered from 1.

    ending: what the attempt will count as when its job, which is being cancelled, has ended. not_before, submitted_at,
    odd_since, unknown_since: on the monotonic clock. odd_since: since when its job is to end, or is hopeless.
    unknown_since: since when its state is unknown. num_doubtful: submissions that failed in words that nobody knows.
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
    gpu_s: float = 0.0

    @property
    def has_started(self) -> bool:
        is_running = self.status is not None and self.status.state != "PENDING"
        return self.phase is Phase.ENDED or (self.phase is Phase.ACTIVE and is_running)

    @property
    def most_gpu_s(self) -> float:
        """GPU seconds that its next, or current, attempt may use."""
        return self.plan.world_size * (self.plan.time_limit_s or 0.0)

    def job(self, root: Path) -> Job:
        """Return its current job. root: of the whole run."""
        status = self.status
        was_listed = status is not None and status.reason != SUBMITTED.reason and status.state != NEVER_STARTED
        return Job(self.plan.key, self.job_id, self.token, root / self.plan.key, self.plan.array_index, was_listed)

    def end_attempt(self, status: JobStatus) -> None:
        """Count what the attempt has used: all of its time limit, if nobody knows."""
        self.status = status
        self.gpu_s += self.most_gpu_s if status.run_time_s is None else self.plan.world_size * status.run_time_s


@dataclass(frozen=True)
class Judgement:
    """What came of an ended attempt. verdict: as in the report.

    failure: the id of what made it fail, "" if nothing did. nodes: the ones that the evidence names.
    """

    verdict: str
    reasons: tuple[str, ...]
    is_success: bool
    failure: str = ""
    is_infrastructure: bool = False
    nodes: tuple[str, ...] = ()


class Judge(Protocol):
    """Judges the last attempt of a run from its files and its job's end."""

    def __call__(self, run: RunPlan, entry: JournalEntry) -> Judgement:
        """Return the judgement; `entry` holds the job's last status."""


class Observer(Protocol):
    """Who wants to know how the runs go."""

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        """A run was submitted, looked at, or has ended."""

    def notice(self, text: str) -> None:
        """Something happened that concerns no single run."""
