"""What a rule sees and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe


@dataclass(frozen=True)
class Point:
    """The input of every rule: scalars only. Absent or zero tp, pp and cp count as 1, as in CloudAI."""

    args: ResolvedCmdArgs
    system: System | None = None
    recipe: Recipe | None = None
    num_nodes: int | None = None

    @property
    def tp(self) -> int:
        return self.args.tp or 1

    @property
    def pp(self) -> int:
        return self.args.pp or 1

    @property
    def cp(self) -> int:
        return self.args.cp or 1

    @property
    def model_parallel_size(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data-parallel size, rounded down; 0 when the model does not fit on the ranks."""
        size = self.model_parallel_size
        return self.args.num_gpus // size if size > 0 else 0


@dataclass(frozen=True)
class Violation:
    """A broken rule: where, the fact with every operand, the remedy."""

    rule_id: str
    where: str
    fact: str
    remedy: str
    operands: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.operands.items())
        return f"{self.rule_id} {self.where}: {self.fact} ({shown}); {self.remedy}"


@dataclass(frozen=True)
class NotEvaluated:
    """A rule that could not be decided, and the input that it lacks."""

    rule_id: str
    missing: str


Answer = Violation | NotEvaluated | None
