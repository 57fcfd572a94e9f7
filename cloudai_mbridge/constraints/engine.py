"""Run all rules over a point."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cloudai_mbridge.constraints import cloudai, embedded, megatron_features, megatron_kernels, megatron_sizes, stack
from cloudai_mbridge.constraints.rule import NO_SETTINGS, Answer, Lifted, NotEvaluated, Point, Violation, rules_in
from cloudai_mbridge.constraints.upstream import Upstream, ask, ask_loop, trained_args
from cloudai_mbridge.megatron_bridge.presets import ACTS_ON, SWITCHED_OFF, Preset, origin
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.apply import core_release

_A = TypeVar("_A", bound=Answer)
RULES = (*rules_in(cloudai), *rules_in(megatron_sizes, megatron_features, megatron_kernels), *rules_in(embedded, stack))


@dataclass(frozen=True)
class CheckResult:
    """Every broken rule, every rule that lacked an input, and every rule of CloudAI's that the release has lifted."""

    violations: tuple[Violation, ...]
    not_evaluated: tuple[NotEvaluated, ...]
    lifted: tuple[Lifted, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.violations


def check(
    cmd_args: ResolvedCmdArgs,
    system: System | None = None,
    recipe: Recipe | None = None,
    num_nodes: int | None = None,
    upstream: Upstream | None = None,
    core: str | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
    env: Mapping[str, Any] | None = None,
) -> CheckResult:
    """Check one point against all rules; all violations are returned, not the first.

    upstream: additions of Megatron-Bridge's launcher to `cmd_args`; None if nothing is added.
    core: the release of Megatron-Core; None: the one of `upstream`, or the one that trains on `system`, if known.
    settings: those of `extra_cmd_args`, for the embedded loop; for the upstream launcher see `upstream`.
    env: the test's variables, which replace those of the system.
    """
    core = core or core_release(system)
    variable = {**(system.global_env_vars if system else {}), **(env or {})}.get
    point = Point(cmd_args, system, recipe, num_nodes, settings=settings, core=core, variable=variable)
    if upstream is None:
        answers = [ask_loop(rule, point) for rule in RULES]
    else:
        trained = upstream.trained(point, trained_args(cmd_args, upstream))
        answers = [ask(rule, point, trained, upstream) for rule in RULES]
    return CheckResult(
        violations=tuple(a for a in answers if isinstance(a, Violation)),
        not_evaluated=tuple(a for a in answers if isinstance(a, NotEvaluated)),
        lifted=tuple(a for a in answers if isinstance(a, Lifted)),
    )


def with_origins(answer: _A, given: Container[str], preset: Preset | None) -> _A:
    """Return the answer on a point of the embedded loop; a violation marks operands of the preset.

    given: arguments that the point sets itself.
    """
    if preset is None or not isinstance(answer, Violation):
        return answer
    shown = {**answer.operands, **_own_value(answer, preset)}
    names = [name for name in shown if name in ACTS_ON and name not in given and preset.values.get(name)]
    off = ", ".join(f"{name} = {SWITCHED_OFF[name]}" for name in names if name in SWITCHED_OFF)
    remedy = f"{answer.remedy}; what the preset set is switched off with {off}" if off else answer.remedy
    operands = {name: value for name, value in shown.items() if name in answer.operands or name in names}
    return replace(answer, operands=operands, remedy=remedy, origins=dict.fromkeys(names, origin(preset)))


def _own_value(broken: Violation, preset: Preset) -> dict[str, Any]:
    """Return the value of the argument that a violation is at, as the preset has it."""
    name = broken.where.rpartition(".")[2]
    return {name: preset.values[name]} if preset.values.get(name) and name not in broken.operands else {}
