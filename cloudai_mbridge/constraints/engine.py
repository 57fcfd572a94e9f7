"""Run all rules over a point."""

from dataclasses import dataclass

from cloudai_mbridge.constraints import cloudai, embedded, megatron
from cloudai_mbridge.constraints.rule import NotEvaluated, Point, Violation
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe

RULES = (*cloudai.RULES, *megatron.RULES, *embedded.RULES)


@dataclass(frozen=True)
class CheckResult:
    """Every broken rule, and every rule that lacked an input."""

    violations: tuple[Violation, ...]
    not_evaluated: tuple[NotEvaluated, ...]

    @property
    def passed(self) -> bool:
        return not self.violations


def check(
    cmd_args: ResolvedCmdArgs, system: System | None = None, recipe: Recipe | None = None, num_nodes: int | None = None
) -> CheckResult:
    """Check one point against all rules; all violations are returned, not the first."""
    point = Point(cmd_args, system, recipe, num_nodes)
    answers = [rule(point) for rule in RULES]
    return CheckResult(
        violations=tuple(a for a in answers if isinstance(a, Violation)),
        not_evaluated=tuple(a for a in answers if isinstance(a, NotEvaluated)),
    )
