"""What a point must satisfy before it may cost GPU time: one rule, one function, one id."""

from cloudai_mbridge.constraints.engine import CheckResult, check
from cloudai_mbridge.constraints.rule import NotEvaluated, Violation

__all__ = ["CheckResult", "NotEvaluated", "Violation", "check"]
