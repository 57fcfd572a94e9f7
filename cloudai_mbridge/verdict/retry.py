"""Which failures are tried again: those of the infrastructure, unless the job was cancelled."""

from dataclasses import dataclass

from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.training.credentials.scrub import redacted
from cloudai_mbridge.verdict.judge import RunOutcome, Verdict
from cloudai_mbridge.verdict.triage import FailureKind

LOST = "LOST"  # a job that was given up, and never started
_CANCELLED_BY_SLURM = "prolog_failed"  # a job that may not be requeued is cancelled, and its node drained


@dataclass(frozen=True)
class Judgement:
    """What the runner has to know of an ended attempt. verdict: as in the report.

    failure: the id of what made it fail, "" if nothing did. nodes: the ones that the evidence names.
    """

    verdict: str
    reasons: tuple[str, ...]
    is_success: bool
    failure: str = ""
    is_infrastructure: bool = False
    nodes: tuple[str, ...] = ()


def judgement_of(outcome: RunOutcome, status: JobStatus | None) -> Judgement:
    """Return what follows from an outcome. status: the job's last."""
    failure = outcome.failure
    is_lost = status is not None and status.state == LOST
    unnamed = "lost" if is_lost else "unknown"
    return Judgement(
        verdict=str(outcome.verdict),
        reasons=tuple(map(redacted, outcome.reasons)),
        is_success=outcome.verdict is Verdict.SUCCESS,
        failure=(failure.id if failure else unnamed) if outcome.reasons else "",
        is_infrastructure=is_lost or _is_infrastructure(outcome, status),
        nodes=failure.nodes if failure else (),
    )


def _is_infrastructure(outcome: RunOutcome, status: JobStatus | None) -> bool:
    """Return whether the job failed by itself, and not by the application's fault."""
    failure = outcome.failure
    if status is None or failure is None or failure.kind is not FailureKind.INFRASTRUCTURE:
        return False
    return status.job_class in (JobClass.FAILED, JobClass.INFRASTRUCTURE) or failure.id == _CANCELLED_BY_SLURM


def why_not_retried(num_retries: int, most_retries: int, *, is_pre_test: bool) -> str:
    """Return why a run that the infrastructure has failed is not tried again, "" if it may be."""
    if is_pre_test:
        return "a pre-test is run once"
    return f"runner.retries = {most_retries}" if num_retries >= most_retries else ""


def retry_delay_s(num_retries: int) -> float:
    """Return how long to wait before retry `num_retries`, counted from 1."""
    return 4.0 ** (num_retries - 1)
