"""Judge whether a run succeeded, why it failed, and whether to retry it."""

from cloudai_mbridge.verdict.judge import (
    PROGRAM_MISSING,
    Judgement,
    RunOutcome,
    Verdict,
    judge,
    judgement_of,
    with_failure,
)
from cloudai_mbridge.verdict.triage import Failure, FailureKind

__all__ = [
    "PROGRAM_MISSING",
    "Failure",
    "FailureKind",
    "Judgement",
    "RunOutcome",
    "Verdict",
    "judge",
    "judgement_of",
    "with_failure",
]
