"""Decide whether a run succeeded, say why not, and whether it is tried again."""

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
