"""Estimates of the points of a sweep: computed once for all points that agree in the relevant values."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cloudai_mbridge.constraints import Upstream, Violation
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.headline import Headline, headline_estimator
from cloudai_mbridge.estimate.memory.estimate import GIB
from cloudai_mbridge.estimate.point import estimate_point
from cloudai_mbridge.estimate.request import EstimateRequest, expands_segments, gpu_of, shipped_by, trained_question
from cloudai_mbridge.megatron_bridge.presets import Preset, describe, why_no_preset, with_loop_preset
from cloudai_mbridge.models.cmd_args import ARGUMENTS, READ, Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.sweep.checked import NOTHING_PINNED, CheckedPoint, recipe_of, with_recipe
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import CHOOSING
from cloudai_mbridge.training.flops import NEW, Formula

_ESTIMATED_BY = {name for name, argument in ARGUMENTS.items() if argument.estimated == READ}


class SweepEstimates:
    """Estimates of one test's points on a system. extra: the test's `extra_cmd_args`."""

    def __init__(
        self,
        sweep: SweepSpace,
        system: System | None,
        extra: Mapping[str, str],
        formula: Formula = NEW,
        pinned: Upstream = NOTHING_PINNED,
    ) -> None:
        self._sweep, self._system, self._extra, self._formula = sweep, system, extra, formula
        self._pinned = pinned
        self._headline = headline_estimator()
        self._axes = set(sweep.grid.names)
        self._base = sweep.base_args()
        self._names = [name for name in sweep.grid.names if name in _ESTIMATED_BY or name in CHOOSING]
        self._choosing = [name for name in CHOOSING if name in self._axes]
        self._bases: dict[tuple[Any, ...], tuple[ResolvedCmdArgs, Recipe | None, Preset | None]] = {}
        self._headline_at = lru_cache(maxsize=10_000)(self._work_out)

    def of(self, point: CheckedPoint) -> Headline:
        """Return the estimate of a point that breaks no rule."""
        coordinates = point.coordinates
        if coordinates.keys() != self._axes or list in map(type, coordinates.values()):
            return self._headline(self.request(point))  # an included point, with arguments of its own
        return self._headline_at(tuple([coordinates[name] for name in self._names]))

    def _work_out(self, values: tuple[Any, ...]) -> Headline:
        """Return the estimate at these values of the axes that estimates read."""
        coordinates = dict(zip(self._names, values, strict=True))
        chosen = {name: coordinates[name] for name in self._choosing}
        key = tuple(chosen.values())
        if key not in self._bases:
            args = self._base.model_copy(update=chosen)
            preset = self._pinned.preset_of(args)
            self._bases[key] = args, recipe_of(args, preset), preset
        args, recipe, preset = self._bases[key]
        args = args.model_copy(update=coordinates)
        return self._headline(self._ask(args, recipe, preset))

    def num_steps(self, point: CheckedPoint) -> int | None:
        """Return the steps of a run of a point."""
        steps = self.value(point, "max_steps")
        return steps if isinstance(steps, int) else None

    def value(self, point: CheckedPoint, name: str) -> Any:
        """Return an argument of a point."""
        return point.coordinates.get(name, getattr(self._base, name))

    def request(self, point: CheckedPoint) -> EstimateRequest:
        """Return a point as a request, as it would be run."""
        args = self._sweep.point(point.coordinates).args
        preset = self._pinned.preset_of(args)
        return self._ask(args, recipe_of(args, preset), preset)

    def _ask(self, args: ResolvedCmdArgs, recipe: Recipe | None, preset: Preset | None) -> EstimateRequest:
        if recipe is None:
            nothing = Recipe(name=args.model_recipe_name, description="", family="", source="", sections={})
            return EstimateRequest(nothing, args, None, f"recipe {args.model_recipe_name!r} is not known here")
        gpu, why = gpu_of(args, self._system)
        if args.launcher is Launcher.EMBEDDED:
            filled_in = describe(with_loop_preset(args, preset))
            shipped = shipped_by(recipe, args, preset, gpu, self._extra)
            args = with_recipe(args, recipe, preset=preset)
            return EstimateRequest(
                recipe,
                args,
                gpu,
                why,
                self._extra,
                self._formula,
                shipped=shipped,
                expands_segments=expands_segments(preset),
                filled_in=filled_in,
            )
        args = with_recipe(args, recipe)
        unknown = "" if preset else why_no_preset(args, self._pinned.release)
        return trained_question(recipe, args, preset, unknown, gpu, why, self._extra, self._formula)


def largest_terms(request: EstimateRequest) -> str:
    """Return the six largest terms of the fullest stage; "" if the memory cannot be estimated."""
    try:
        memory = estimate_point(request).memory
    except BadInput:
        return ""
    if memory is None or memory.worst_stage is None:
        return ""
    largest = sorted(memory.stages[memory.worst_stage].terms.items(), key=lambda term: -term[1])
    shown = [f"{name} {size / GIB:.1f}" for name, size in largest[:6] if size]
    rest = sum(size for _, size in largest[6:])
    return ", ".join([*shown, f"other {rest / GIB:.1f}"]) + " GiB"


def memory_violation(headline: Headline, share: float, request: EstimateRequest) -> Violation:
    """Return why a point is held back: no rule, since the limit is the user's and the estimate may be wrong."""
    remedy = f"raise sweep.memory_share above {share:g} to run it"
    if headline.memory_share is None:
        fact = f"its memory cannot be predicted: {'; '.join(headline.why) or 'the memory of the GPU is not known'}"
        remedy = "make it known, or leave out sweep.memory_share to run it"
        return Violation("MEMORY", "estimate", fact, remedy, {"memory_share": share})
    needed, given = headline.peak_memory_gib or 0.0, headline.gpu_memory_gib or 0.0
    return Violation(
        rule_id="MEMORY",
        where="estimate",
        fact=f"stage {headline.worst_stage} is predicted to need {needed:.1f} of {given:.0f} GiB, states and"
        f" activations {headline.memory_share:.0%} of it: {largest_terms(request)}",
        remedy=remedy,
        operands={"peak_memory_gib": round(needed, 2), "gpu_memory_gib": given, "memory_share": share},
    )
