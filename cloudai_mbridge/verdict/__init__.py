"""Decide whether a run succeeded, say why not, and whether it is tried again."""

from cloudai_mbridge.verdict.judge import Judgement, RunOutcome, Verdict, judge, judgement_of, with_failure
from cloudai_mbridge.verdict.triage import Failure, FailureKind

__all__ = ["Failure", "FailureKind", "Judgement", "RunOutcome", "Verdict", "judge", "judgement_of", "with_failure"]
