"""Decide whether a run succeeded, and say why not."""

from cloudai_mbridge.verdict.judge import RunOutcome, Verdict, judge

__all__ = ["RunOutcome", "Verdict", "judge"]
