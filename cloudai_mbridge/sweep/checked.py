"""The points of a test with the answers of the rules, and the most informative of them first."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cloudai_mbridge.constraints import Lifted, NotEvaluated, Upstream, Violation, check
from cloudai_mbridge.constraints.engine import with_origins
from cloudai_mbridge.estimate.headline import Headline
from cloudai_mbridge.files.text import label
from cloudai_mbridge.megatron_bridge.presets import Preset, given_to_loop, with_loop_preset
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe, load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import with_model_facts, with_recipe_defaults
from cloudai_mbridge.recipes.load import recipe_for
from cloudai_mbridge.recipes.presets import with_preset_of
from cloudai_mbridge.sweep.expand import SweepPoint, SweepSpace, Values
from cloudai_mbridge.sweep.pinned import CHOOSING, STRUCTURAL, preset_key
from cloudai_mbridge.sweep.screen import RuleScreen

NOTHING_PINNED = Upstream()
_SOFTWARE = "E14"
_Answers = tuple[Violation | NotEvaluated | Lifted, ...]


@dataclass
class CheckedPoint:
    """Coordinates with the answers of the rules; the point itself is made only when asked for.

    The rest is filled in when the point is judged; gpu_hours, cost and left_out only in a preview.
    headline: None if the point breaks a rule. is_held_back: for its memory. gpu_hours, cost: of the steps of all its
    runs; None if unknown. left_out: why it was not chosen, "" if it was. beyond: the limit of the sweep that leaves the
    point out, such as "max_points = 3"; "" for none.
    """

    sweep: SweepSpace
    coordinates: dict[str, Any]
    answers: _Answers
    pinned: Upstream = NOTHING_PINNED
    headline: Headline | None = None
    is_held_back: bool = False
    beyond: str = ""
    gpu_hours: float | None = None
    cost: float | None = None
    left_out: str = ""

    @property
    def label(self) -> str:
        return label(self.coordinates)

    @property
    def is_run(self) -> bool:
        """Whether the point is within all limits."""
        return self.headline is not None and not self.is_held_back and not self.beyond

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(answer for answer in self.answers if isinstance(answer, Violation))

    @property
    def lifted(self) -> tuple[Lifted, ...]:
        """Objections of CloudAI to the point that the pinned release does not have."""
        return tuple(answer for answer in self.answers if isinstance(answer, Lifted))

    @property
    def unknown_software(self) -> tuple[str, ...]:
        """The software that the point needs and nobody could be asked about: what rule E14 lacks."""
        answers = (each for each in self.answers if isinstance(each, NotEvaluated) and each.rule_id == _SOFTWARE)
        return tuple(each.missing for each in answers if " has " in each.missing)

    def resolve(self) -> tuple[SweepPoint, ResolvedCmdArgs, Recipe | None]:
        """Return the point, its arguments with the values of preset and recipe, and the recipe."""
        point = self.sweep.point(self.coordinates)
        preset = self.pinned.preset_of(point.args)
        recipe = recipe_of(point.args, preset)
        return point, with_recipe(point.args, recipe, preset=preset), recipe


def with_recipe(
    args: ResolvedCmdArgs, recipe: Recipe | None, but: Collection[str] = (), preset: Preset | None = None
) -> ResolvedCmdArgs:
    """Fill in values of our recipe: for the embedded loop all, for upstream's launcher the sizes of the model.

    preset: the point's; for the embedded loop, it takes precedence over the recipe.
    """
    if recipe is None:
        return args
    if args.launcher is not Launcher.EMBEDDED:
        return with_model_facts(args, recipe, but=but)
    resolved = with_loop_preset(args, preset)
    return with_recipe_defaults(resolved.args, recipe, but={*but, *resolved.from_preset})


def recipe_of(args: ResolvedCmdArgs, preset: Preset | None = None) -> Recipe | None:
    """Return the recipe that the arguments name; None for one of Megatron-Bridge's that is unknown here.

    preset: the point's; in the embedded loop the recipe has its settings.
    BadInput: the embedded loop has no such recipe.
    """
    if args.launcher is Launcher.EMBEDDED:
        return with_preset_of(recipe_for(args.model_recipe_name, args.task), preset)
    return load_recipe(args.model_recipe_name) if args.model_recipe_name in recipe_names() else None


def checked_points(
    sweep: SweepSpace, system: System | None, pinned: Upstream = NOTHING_PINNED
) -> Iterator[CheckedPoint]:
    """Check the whole grid, point by point, then the included points."""
    screen_of = _screens(sweep, system, pinned)
    for values in sweep.grid:
        yield CheckedPoint(sweep, sweep.coordinates(values), screen_of(values).check(values), pinned)
    for point in sweep.included():
        upstream = pinned.at(point.args)
        nodes = point.num_nodes if upstream is None else None
        preset = pinned.preset_of(point.args) if upstream is None else None
        recipe = recipe_of(point.args, preset)
        args = with_recipe(point.args, recipe, preset=preset)
        settings = pinned.settings if upstream is None else {}
        result = check(args, system, recipe, nodes, upstream, settings=settings, env=point.env)
        violations = [with_origins(each, given_to_loop(point.args), preset) for each in result.violations]
        answers: _Answers = (*violations, *result.not_evaluated, *result.lifted)
        yield CheckedPoint(sweep, dict(point.coordinates), answers, pinned)


def _screens(sweep: SweepSpace, system: System | None, pinned: Upstream) -> Callable[[Values], RuleScreen]:
    """Return a function that returns the screen of a point: one for a launcher, a recipe and a preset."""
    base, grid = sweep.base_args(), sweep.grid
    choosing = {name: grid.names.index(name) for name in CHOOSING if name in grid.names}
    indices = tuple(choosing.values())
    made: dict[tuple[Any, ...], RuleScreen] = {}

    @cache
    def screen(choice: Values) -> RuleScreen:
        chosen = dict(zip(choosing, choice, strict=True))
        launcher = Launcher(chosen.get("launcher", base.launcher))
        args = base.model_copy(update={**chosen, "launcher": launcher})
        upstream, preset = pinned.at(args), pinned.preset_of(args)
        key = (args.launcher, args.model_recipe_name, args.task, preset_key(preset))
        if key not in made:
            recipe = recipe_of(args, preset)
            axes = [name for name in grid.names if name in type(args).model_fields and name not in STRUCTURAL]
            shared = with_recipe(args, recipe, but=axes)
            env = {**(system.global_env_vars if system else {}), **sweep.env}
            own = (preset, given_to_loop(base)) if preset and upstream is None else None
            settings = pinned.settings if upstream is None else {}
            made[key] = RuleScreen(grid, shared, system, recipe, sweep.num_nodes, upstream, settings, env, own)
        return made[key]

    return lambda values: screen(tuple([values[i] for i in indices]))


_Key = tuple[Any, ...]
_Best = dict[_Key, tuple[float, CheckedPoint]]  # by the shared values, the fastest point; the first of equals


def informative(
    points: Callable[[], Iterator[CheckedPoint]], speed: Callable[[CheckedPoint], float | None]
) -> Iterator[CheckedPoint]:
    """Yield all points, the leading points first, the others in their order.

    speed: predicted tokens/s/GPU of a point that breaks no rule, 0 if unknown; None: it cannot lead.
    """
    splits: _Best = {}
    values: _Best = {}
    for point in points():
        if not point.violations and (rate := speed(point)) is not None:
            _keep(splits, (point.coordinates.get("tp"), point.coordinates.get("pp")), rate, point)
            for value in _values(point):
                _keep(values, value, rate, point)
    leading = [point for _, point in sorted(splits.values(), key=lambda one: -one[0])]
    covered = {value for point in leading for value in _values(point)}
    for value, (_, point) in sorted(values.items(), key=lambda one: -one[1][0]):
        if value not in covered:
            leading.append(point)
            covered.update(_values(point))
    yield from leading
    first = {_values(point) for point in leading}
    yield from (point for point in points() if _values(point) not in first)


def _keep(best: _Best, key: _Key, rate: float, point: CheckedPoint) -> None:
    if key not in best or rate > best[key][0]:
        best[key] = (rate, point)


def _values(point: CheckedPoint) -> tuple[_Key, ...]:
    """Return the axes with the point's values on them, lists as tuples, which can be looked up."""
    pairs = point.coordinates.items()
    return tuple([(name, tuple(value) if isinstance(value, list) else value) for name, value in pairs])
