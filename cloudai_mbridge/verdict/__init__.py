"""Decide whether a run succeeded, and say why not."""

from cloudai_mbridge.verdict.explain import explain
from cloudai_mbridge.verdict.judge import RunOutcome, Verdict, judge
from cloudai_mbridge.verdict.triage import Failure, FailureKind

__all__ = ["Failure", "FailureKind", "RunOutcome", "Verdict", "explain", "judge"]
