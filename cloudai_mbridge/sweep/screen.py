"""Fast check of the points of a grid: a rule is evaluated once per combination of the values that it reads.

Rules read their inputs through attributes, so the inputs of a rule are recorded while it runs. A rule that reads tp, pp
and num_gpus is run once per (tp, pp, num_gpus) of the grid, however many points share them.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from cloudai_mbridge.constraints.engine import RULES, with_origins
from cloudai_mbridge.constraints.rule import (
    NO_SETTINGS,
    Answer,
    Lifted,
    NotEvaluated,
    Point,
    ReadArgs,
    UnknownOperandError,
    Violation,
)
from cloudai_mbridge.constraints.upstream import ON_WRITTEN_ALONE, Upstream, ask, ask_loop
from cloudai_mbridge.megatron_bridge.presets import (
    ACTS_ON,
    UNSET,
    UPSTREAM_DECIDES,
    Preset,
    filled_in,
    given_values,
    resolve_sizes,
)
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.apply import core_release
from cloudai_mbridge.sweep.expand import ENV, NUM_NODES, Grid, Values

_LARGEST_TABLE = 50_000
_PROBES = 200
_LOOKS_PER_RUN = 32  # table look-ups in the time of running a rule once

# The axes that a value of the launcher's depends on, in addition to its own
_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "gb": ("num_gpus", "tp", "pp", "cp"),
    "pipeline_model_parallel_layout": ("pp", "vp"),
    "recompute_modules": ("recompute_num_layers",),
    "recompute_num_layers": ("recompute_modules",),
    "cuda_graph_impl": ("cuda_graph_scope",),
    "cuda_graph_scope": ("cuda_graph_impl",),
}
_DECIDED = frozenset(UPSTREAM_DECIDES)
_FILLED = frozenset(ACTS_ON)

Answers = tuple[Violation | NotEvaluated | Lifted, ...]
Rule = Callable[[Point], Answer]
Read = Callable[[str], Any]


class RuleScreen:
    """All rules over the points of one grid, for one recipe.

    base: the arguments that all points share, recipe defaults included. num_nodes: the scenario's, unless an axis.
    upstream: additions of Megatron-Bridge's launcher to the arguments; None: nothing is added.
    settings: those of `extra_cmd_args` in a test of the embedded loop. env: variables that all points share.
    loop_preset: of a test of the embedded loop, with the values that all points set of arguments that it may fill in.
    """

    def __init__(
        self,
        grid: Grid,
        base: ResolvedCmdArgs,
        system: System | None = None,
        recipe: Recipe | None = None,
        num_nodes: int | None = None,
        upstream: Upstream | None = None,
        settings: Mapping[str, Any] = NO_SETTINGS,
        env: Mapping[str, Any] | None = None,
        loop_preset: tuple[Preset, Mapping[str, Any]] | None = None,
    ) -> None:
        self._env, self._loop_preset = env or {}, loop_preset
        self.names, self._upstream = grid.names, upstream
        self._system, self._recipe, self._num_nodes = system, recipe, num_nodes
        self._settings = settings
        self._takes_its_own_nodes = base.launcher is Launcher.MEGATRON_BRIDGE
        shared = {name: getattr(base, name) for name in type(base).model_fields}
        shared["model_fields_set"] = base.model_fields_set | (set(grid.names) & shared.keys())
        self._shared = SimpleNamespace(**shared)
        # Arguments that the launcher or an override may decide
        self._guarded = _DECIDED | (upstream.overridden if upstream else frozenset())
        self._lengths = {
            name: len({row[i] for row in rows})
            for rows, positions in zip(grid.dimensions, grid.positions, strict=True)
            for i, name in enumerate(grid.names[p] for p in positions)
        }
        self._tables = self._make_tables(grid)

    def check(self, values: Values) -> Answers:
        """Return every violation, and every rule that gave no verdict, of a point of the grid."""
        found: Answers = ()
        for table in self._tables:
            if answers := table.answers(values):
                found += answers
        return found

    def _make_tables(self, grid: Grid) -> list["_Table"]:
        """Group the rules by the axes that they read on a sample of the grid; a group's table must stay small."""
        draw = random.Random(0)  # noqa: S311 - a sample, no secret
        sample = [grid.sample(draw) for _ in range(min(_PROBES, grid.size))]
        looks = {rule: {name for values in sample for name in self.run_all([rule], values)[1]} for rule in RULES}
        tables: list[_Table] = []
        for rule in sorted(RULES, key=lambda rule: -self.table_size(looks[rule])):
            home = next((t for t in tables if self._pays(t, looks[rule], grid.size)), None)
            if home is None:
                tables.append(home := _Table(self))
            home.rules.append(rule)
            home.looks |= looks[rule]
        for table in tables:
            table.rules.sort(key=RULES.index)
            table.set_looks(table.looks)
        return tables

    def _pays(self, table: "_Table", names: set[str], num_points: int) -> bool:
        """Return whether a rule that reads these axes costs less in this table than in a table of its own.

        There it is run for more combinations, and so may the others be; a table costs every point a look-up.
        """
        merged = self.table_size(table.looks | names)
        more_runs = merged - self.table_size(names) + (merged - self.table_size(table.looks)) * len(table.rules)
        return merged <= _LARGEST_TABLE and more_runs * _LOOKS_PER_RUN <= num_points

    def table_size(self, names: set[str]) -> int:
        return math.prod(self._lengths[name] for name in names)

    def run_all(self, rules: Sequence[Rule], values: Values) -> tuple[Answers, set[str]]:
        """Run rules on a point; return their objections and the axes that any of them read."""
        chosen = dict(zip(self.names, values, strict=True))
        looked: set[str] = set()

        def read(name: str) -> Any:
            if name in chosen:
                looked.add(name)
                return chosen[name]
            return getattr(self._shared, name)

        def variable(name: str) -> Any:
            axis = f"{ENV}{name}"
            if axis not in chosen:
                return self._env.get(name)
            looked.add(axis)
            return chosen[axis]

        of_loop = read if self._loop_preset is None else self._as_filled_in(chosen, read, *self._loop_preset)
        args: Any = ReadArgs(of_loop)
        if NUM_NODES in chosen:  # not an argument: its readers are not recorded, so all rules count as readers
            looked.add(NUM_NODES)
        # the scenario's number does not reach the upstream launcher, which takes its own
        nodes = None if self._takes_its_own_nodes else chosen.get(NUM_NODES, self._num_nodes)
        core = core_release(self._system)
        settings = self._settings
        point = Point(args, self._system, self._recipe, nodes, settings=settings, core=core, variable=variable)
        upstream = self._upstream
        if upstream is None or (len(rules) == 1 and rules[0] in ON_WRITTEN_ALONE):  # often run for every point
            answers = [ask_loop(rule, point) for rule in rules]
        else:
            trained = upstream.trained(point, ReadArgs(self._as_trained(chosen, read, upstream)))
            answers = [ask(rule, point, trained, upstream) for rule in rules]
        if self._loop_preset is not None:
            preset, given = self._loop_preset
            answers = [with_origins(answer, {*given, *chosen}, preset) for answer in answers]
        return tuple([answer for answer in answers if answer is not None]), looked

    def _as_filled_in(self, chosen: Mapping[str, Any], read: Read, preset: Preset, given: Mapping[str, Any]) -> Read:
        """Return a function that reads arguments with what a preset fills in for the embedded loop.

        chosen: the point's own values. read: reads them, and others that all points share. given: what all points set
        themselves.
        """

        @cache
        def values() -> dict[str, Any]:
            own = {axis: chosen[axis] for axis in ACTS_ON if axis in chosen}
            return filled_in({**given, **own}, chosen.get("num_gpus", self._shared.num_gpus), preset)

        def read_filled_in(name: str) -> Any:
            value = read(name)
            if name not in _FILLED or name in chosen or name in given:
                return value
            for axis in _FOLLOWS.get(name, ()):
                read(axis)
            return values().get(name, value)

        return read_filled_in

    def _as_trained(self, chosen: Mapping[str, Any], read: Read, upstream: Upstream) -> Read:
        """Return a function that reads arguments with what the launcher fills in.

        It raises UnknownOperandError for an unknown argument. chosen, read: as above.
        """
        preset = upstream.preset
        values = None if preset is None else cache(partial(self._resolved, chosen, preset))

        def read_trained(name: str) -> Any:
            value = read(name)
            if name not in self._guarded:
                return value
            if upstream.overrides(name, value) or (values is None and value in UNSET):
                raise UnknownOperandError(upstream.why_unknown(name))
            if values is None:
                return value
            for axis in _FOLLOWS.get(name, ()):
                read(axis)
            if name not in values():
                raise UnknownOperandError(upstream.why_unknown(name))
            return values()[name]

        return read_trained

    def _resolved(self, chosen: Mapping[str, Any], preset: Preset) -> dict[str, Any]:
        """Return the sizes of a point as the launcher resolves them."""
        written = {name: chosen.get(name, getattr(self._shared, name)) for name in UPSTREAM_DECIDES}
        return resolve_sizes(given_values(written), chosen.get("num_gpus", self._shared.num_gpus), preset)


class _Table:
    """Answers of some rules by the values of the axes that they read."""

    def __init__(self, screen: RuleScreen) -> None:
        self._screen = screen
        self.rules: list[Rule] = []
        self.looks: set[str] = set()
        self._answers: dict[Any, Answers] = {}
        self._key: Callable[[Values], Any] = lambda values: None

    def set_looks(self, names: set[str]) -> None:
        self.looks = set(names)
        self._answers.clear()
        indices = sorted(map(self._screen.names.index, names))
        self._key = itemgetter(*indices) if indices else lambda values: None

    def answers(self, values: Values) -> Answers:
        try:
            return self._answers[self._key(values)]
        except KeyError:
            return self._work_out(values)

    def _work_out(self, values: Values) -> Answers:
        found, looked = self._screen.run_all(self.rules, values)
        if not looked <= self.looks:  # a branch that no probe took
            self.set_looks(self.looks | looked)
        if self._screen.table_size(self.looks) <= _LARGEST_TABLE:
            self._answers[self._key(values)] = found
        return found
