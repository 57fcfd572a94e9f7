"""Constraints that a point must satisfy before it may cost GPU time: one rule, one function, one id."""

from cloudai_mbridge.constraints.engine import CheckResult, check
from cloudai_mbridge.constraints.rule import Lifted, NotEvaluated, RuleSet, Violation
from cloudai_mbridge.constraints.upstream import Upstream

__all__ = ["CheckResult", "Lifted", "NotEvaluated", "RuleSet", "Upstream", "Violation", "check"]
