"""The points of a test with what the rules say of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.constraints import NotEvaluated, Violation, check
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe, load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import with_recipe_defaults
from cloudai_mbridge.sweep.expand import Sweep, SweepPoint
from cloudai_mbridge.sweep.grid import Values
from cloudai_mbridge.sweep.screen import Screen

# Axes that change what the other arguments mean; points that differ in them are screened apart.
_STRUCTURAL = ("launcher", "model_recipe_name")


@dataclass(frozen=True)
class CheckedPoint:
    """Coordinates with the answers of the rules; the point itself is made only when asked for."""

    sweep: Sweep
    coordinates: dict[str, Any]
    answers: tuple[Violation | NotEvaluated, ...]

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(answer for answer in self.answers if isinstance(answer, Violation))

    def resolve(self) -> tuple[SweepPoint, ResolvedCmdArgs, Recipe | None]:
        """Return the point, its arguments with the recipe's defaults, and the recipe."""
        point = self.sweep.point(self.coordinates)
        recipe = recipe_of(point.args)
        return point, with_recipe_defaults(point.args, recipe) if recipe else point.args, recipe


def recipe_of(args: ResolvedCmdArgs) -> Recipe | None:
    """Return the recipe that the arguments name. Megatron-Bridge has recipes that are unknown here; ours must exist.

    Raises:
        BadInput: the embedded loop is asked for a recipe that does not exist.
    """
    if args.launcher is Launcher.EMBEDDED or args.model_recipe_name in recipe_names():
        return load_recipe(args.model_recipe_name)
    return None


def checked_points(sweep: Sweep, system: System | None) -> Iterator[CheckedPoint]:
    """Check the whole grid, point by point, then the included points."""
    base = sweep.base_args()
    screens: dict[tuple[Any, ...], Screen] = {}
    structural = [sweep.grid.names.index(name) for name in _STRUCTURAL if name in sweep.grid.names]
    for values in sweep.grid:
        kind = tuple([values[i] for i in structural])
        if (screen := screens.get(kind)) is None:
            screen = screens[kind] = _screen(sweep, base, values, structural, system)
        yield CheckedPoint(sweep, sweep.coordinates(values), screen.check(values))
    for point in sweep.included():
        recipe = recipe_of(point.args)
        args = with_recipe_defaults(point.args, recipe) if recipe else point.args
        nodes = None if args.launcher is Launcher.MEGATRON_BRIDGE else point.num_nodes
        result = check(args, system, recipe, nodes)
        yield CheckedPoint(sweep, dict(point.coordinates), (*result.violations, *result.not_evaluated))


def _screen(
    sweep: Sweep, base: ResolvedCmdArgs, values: Values, structural: list[int], system: System | None
) -> Screen:
    chosen = {sweep.grid.names[i]: values[i] for i in structural}
    args = base.model_copy(update={**chosen, "launcher": Launcher(chosen.get("launcher", base.launcher))})
    recipe = recipe_of(args)
    if recipe is None:
        return Screen(sweep.grid, args, system, None, sweep.num_nodes)
    axes = [name for name in sweep.grid.names if name in type(args).model_fields and name not in chosen]
    return Screen(sweep.grid, with_recipe_defaults(args, recipe, but=axes), system, recipe, sweep.num_nodes)
