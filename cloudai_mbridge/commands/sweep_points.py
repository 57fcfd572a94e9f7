"""What a scenario's sweeps hold before anything is written or run, and the case of one point."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.constraints import Lifted, NotEvaluated, Violation
from cloudai_mbridge.constraints.engine import RULES
from cloudai_mbridge.constraints.upstream import rule_id
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.names import label
from cloudai_mbridge.megatron_bridge.presets.find import describe, with_preset
from cloudai_mbridge.models.loading.explain import suggest
from cloudai_mbridge.models.loading.load import Warn, load_scenario, load_system
from cloudai_mbridge.models.loading.loaded import NO_HOOKS
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan.preview import PlanOptions, PointPreview, SweepPreview
from cloudai_mbridge.sweep import CheckedPoint, checked_points

_MOST_LABELS = 8


def plans(
    system_config: Path,
    test_scenario: Path,
    tests_dir: Path | None,
    options: PlanOptions,
    on_unknown_arg: Warn | None = None,
) -> Iterator[SweepPreview]:
    """Yield the plan of every test of a scenario, none of its points worked out yet."""
    system = load_system(system_config)
    for test in load_scenario(test_scenario, tests_dir, on_unknown_arg, NO_HOOKS).tests:
        yield SweepPreview(test, system, options)


@dataclass(frozen=True)
class Explanation:
    """What every rule says of one point; None where it has nothing against it.

    fill_in: what the launcher fills in; "" for nothing. plan, look: the test's plan, and what it says of the point.
    """

    label: str
    coordinates: dict[str, Any]
    verdicts: dict[str, Violation | NotEvaluated | Lifted | None]
    plan: SweepPreview
    look: PointPreview
    fill_in: str = ""


def explain_point(
    system_config: Path,
    test_scenario: Path,
    tests_dir: Path | None,
    test_id: str,
    point: str,
    options: PlanOptions,
    on_unknown_arg: Warn | None = None,
) -> Explanation:
    """Find a point by its label, or by coordinates such as "tp=2,pp=4", and ask all rules and the plan.

    Raises:
        BadInput: no such test or point, or several points have these coordinates.
    """
    system = load_system(system_config)
    tests = {test.run.id: test for test in load_scenario(test_scenario, tests_dir, on_unknown_arg, NO_HOOKS).tests}
    if test_id not in tests:
        raise BadInput(f"{test_scenario}: no test {test_id!r}; {suggest(test_id, list(tests))}")
    plan = SweepPreview(tests[test_id], system, options)
    found = _find(plan, system, point)
    answers = {answer.rule_id: answer for answer in found.answers}
    verdicts = {rule_id(rule): answers.get(rule_id(rule)) for rule in RULES}
    args = found.sweep.point(found.coordinates).args
    upstream = plan.pinned.upstream(args)
    fill_in = describe(with_preset(args, upstream.preset), upstream.overridden) if upstream else ""
    return Explanation(label(found.coordinates), found.coordinates, verdicts, plan, plan.preview(found), fill_in)


def _find(plan: SweepPreview, system: System, wanted: str) -> CheckedPoint:
    coordinates = dict(part.strip().partition("=")[::2] for part in wanted.split(",")) if "=" in wanted else {}
    where, axes = f"test {plan.test_id!r}", plan.sweep.grid.names
    for name in coordinates:
        if name not in axes:
            raise BadInput(f"{where}: {name!r} is not an axis; axes are {', '.join(axes) or 'none'}")
    points = checked_points(plan.sweep, system, plan.pinned)
    found = [point for point in points if _is_wanted(point, wanted, coordinates)]
    if not found:
        raise BadInput(f"{where}: no point {wanted!r}; `mbridge sweep plan` lists labels and axes")
    if len(found) > 1:
        open_axes = [name for name in axes if name not in coordinates]
        labels = ", ".join(label(point.coordinates) for point in found[:_MOST_LABELS])
        more = f" and {len(found) - _MOST_LABELS} more" if len(found) > _MOST_LABELS else ""
        raise BadInput(
            f"{where}: {wanted!r} are the coordinates of {len(found)} points, {labels}{more};"
            f" also give {', '.join(open_axes)}, or give a label"
        )
    return found[0]


def _is_wanted(point: CheckedPoint, wanted: str, coordinates: dict[str, str]) -> bool:
    if not coordinates:
        return label(point.coordinates) == wanted
    return all(_is_value(point.coordinates.get(name), text) for name, text in coordinates.items())


def _is_value(value: Any, text: str) -> bool:
    """Return whether a coordinate is what the user wrote: in Python's or in TOML's spelling."""
    return text.strip() in (str(value), json.dumps(value))
