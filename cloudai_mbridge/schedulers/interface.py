"""Jobs as the runner sees them, whichever scheduler runs them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cloudai_mbridge.plan import RunPlan


class JobClass(StrEnum):
    """Meaning of a state for the run.

    UNKNOWN passes: the scheduler reports an undocumented state, or nothing, and is asked again. LOST is what
    it becomes after a deadline. SKIPPED was never submitted. STOPPED ended because another test had, as was asked.
    """

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed by the application"
    INFRASTRUCTURE = "failed by the infrastructure"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    LOST = "lost"
    SKIPPED = "skipped"
    STOPPED = "stopped"


@dataclass(frozen=True)
class JobStatus:
    """A job as last seen. `state` is the scheduler's own word; exit code and signal if known.

    nodes: a host list as the scheduler writes it. run_time_s: how long it has been running. restarts: how often the
    scheduler itself started it again. hopeless: what it counts as, if it waits for something that will not come.
    """

    state: str
    job_class: JobClass
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    nodes: str = ""
    run_time_s: float | None = None
    restarts: int = 0
    hopeless: JobClass | None = None

    @property
    def is_final(self) -> bool:
        return self.job_class not in (JobClass.ACTIVE, JobClass.UNKNOWN)

    @property
    def is_listed(self) -> bool:
        """Whether the scheduler has once listed the job."""
        return self.reason != SUBMITTED.reason and self.state != NEVER_STARTED


# States that every scheduler names alike; any other state is the scheduler's own word
PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"
# States of jobs unknown to the scheduler: nothing of theirs was started, or something was and left no end.
NEVER_STARTED, FORGOTTEN = "NEVER_STARTED", "FORGOTTEN"
# Added to the reason of a failed job without claim and start mark; and the number that Slurm reports in place
# of a signal if the node could not open the job's directory or output file, which proves it
NEVER_BEGAN, NOT_LAUNCHED = "its script never began", 53
# State of a trial that was ended because it can no longer win a search (docs/tune.md)
ENDED_EARLY = "ENDED_EARLY"
# Status until the scheduler reports more
SUBMITTED = JobStatus(PENDING, JobClass.ACTIVE, reason="just submitted")


@dataclass(frozen=True)
class Submission:
    """Runs that go to the scheduler in one call; several only if it put them into one batch.

    token: unique; the jobs carry it, so that they are found even if their ids were lost.
    exclude_nodes: on top of what each run excludes itself. parallel: how many of the runs may run at a time.
    keep_open: a descriptor that the submitting command inherits, and with it the lock on submissions.
    """

    token: str
    runs: tuple[RunPlan, ...]
    exclude_nodes: tuple[str, ...] = ()
    parallel: int | None = None
    keep_open: int | None = None


@dataclass(frozen=True)
class Job:
    """A job of a run. The token is the truth about which it is; the id is what the submission answered.

    token: "" if none tells its jobs apart. array_index: its place, if it was submitted as a task of an array.
    directory: of the run. was_listed: the scheduler has once listed it.
    """

    key: str
    job_id: str
    token: str
    directory: Path
    array_index: int | None = None
    was_listed: bool = False


@dataclass(frozen=True)
class Seen:
    """A job as the scheduler has it. job_id differs from the one asked for if the submission's answer was wrong.

    has_rivals: there are further jobs of the same token that have not ended.
    name, directory: of Slurm's jobs alone; "" if not listed.
    """

    job_id: str
    status: JobStatus
    has_rivals: bool = False
    name: str = ""
    directory: str = ""


class SubmitRefused(Exception):
    """The scheduler refused a submission for good; the message is its own."""


class SubmitOutcomeUnknown(Exception):
    """The submission failed with a message that leaves open whether something was submitted; `find` tells.

    If nothing was, it is refused with the scheduler's own message.
    """


class SubmitLater(Exception):
    """Nothing was submitted, and it is worth another try: the scheduler is busy, or a limit on jobs is reached.

    is_limit: it passes only when jobs end.
    """

    def __init__(self, text: str, *, is_limit: bool = False) -> None:
        super().__init__(text)
        self.is_limit = is_limit


class Scheduler(Protocol):
    """Scheduler of jobs: Slurm or this machine. Every method may raise ToolFailure if the scheduler does not answer."""

    @property
    def pace(self) -> tuple[float, float, float]:
        """Return the shortest and longest seconds between two polls, and the share as `Pace` has it."""

    @property
    def may_be_late(self) -> bool:
        """Return whether files of jobs are seen later than their ends: jobs write on other machines."""

    def preflight(self) -> None:
        """Raise BadInput or ToolFailure if nothing can be submitted."""

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        """Put runs that one submission can hold together, keeping their order."""

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Start runs, each in its directory below `root`, and return their job ids by run key.

        SubmitRefused, SubmitLater: nothing was submitted.
        SubmitOutcomeUnknown, ToolFailure: the outcome is unknown; `find` determines it.
        """

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        """Return the job ids, by run key, that earlier submissions have started."""

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Return every job as the scheduler has it, by run key."""

    def observe(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Return every job as `poll`, for a reader: ask once, for a few seconds at most, and change nothing.

        A job that is gone without evidence of its end is UNKNOWN. ToolFailure: the scheduler does not answer in time.
        """

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Request the end of the jobs, and of all others of their tokens; ended jobs are not an error."""

    def throttle(self, jobs: Iterable[Job], parallel: int) -> None:
        """Change how many of the jobs, which one submission has started, may run at a time; running ones go on."""

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        """Return the nodes of a job's host list that are out of service, with the reason."""

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        """Return how many nodes could take a job if these were excluded, None if unknown."""

    def may_start(self, run: RunPlan, status: JobStatus) -> bool:
        """Return whether a hopeless job can start after all: it waits for nodes that exist and are down."""

    def exceeded(self, run: RunPlan, status: JobStatus) -> str:
        """Return the part of a hopeless job's request that exceeds a limit, such as "3 nodes"; "" if unknown."""
