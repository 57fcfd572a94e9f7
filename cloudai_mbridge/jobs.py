"""What the runner knows of a job, whichever scheduler runs it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cloudai_mbridge.plan import RunPlan


class JobClass(StrEnum):
    """What a scheduler's state means for the run."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed by the application"
    INFRASTRUCTURE = "failed by the infrastructure"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class JobStatus:
    """A job as last seen. `state` is the scheduler's own word; exit code and signal where they are known."""

    state: str
    job_class: JobClass
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    nodes: str = ""

    @property
    def is_final(self) -> bool:
        return self.job_class is not JobClass.ACTIVE


class SubmitRefused(Exception):
    """The scheduler refused a job for good; the message is in its own words."""


class Scheduler(Protocol):
    """What runs jobs: Slurm or this machine."""

    def preflight(self) -> None:
        """Raise BadInput or ToolFailure if nothing can be submitted."""

    def submit(self, plan: RunPlan, directory: Path) -> str:
        """Start a run in its directory and return the job's id, or raise SubmitRefused."""

    def poll(self, jobs: Mapping[str, Path]) -> dict[str, JobStatus]:
        """Return the status of every job, given as id -> directory."""

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Ask the jobs to end."""
