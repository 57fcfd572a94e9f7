"""From a definition with lists to points with scalars, made one at a time: a million of them never exist together."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.text import label
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.credentials import find_credential
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.test_definition import SweepConfig, TestDefinition
from cloudai_mbridge.training.credentials.find import is_secret

NUM_NODES = "num_nodes"
ENV = "env."  # before the name of a variable that is an axis


def path_of(axis: str) -> str:
    """Return the key path of an axis, such as cmd_args.tp of tp, and extra_env_vars.X of env.X."""
    if axis.startswith(ENV):
        return axis.replace(ENV, "extra_env_vars.", 1)
    return axis if axis == NUM_NODES else f"cmd_args.{axis}"


def find_axes(definition: TestDefinition, run: TestRun) -> dict[str, tuple[Any, ...]]:
    """Return the values of each axis in field order: arguments, variables as env.X, nodes. The last varies fastest."""
    args = definition.cmd_args
    values = {name: getattr(args, name) for name in type(args).model_fields}
    values |= {f"{ENV}{name}": value for name, value in definition.extra_env_vars.items()}
    values[NUM_NODES] = run.num_nodes
    axes = {name: tuple(value) for name, value in values.items() if _is_axis(value, path_of(name), definition)}
    if empty := [path_of(name) for name, value in axes.items() if not value]:
        raise BadInput(f"test {run.id!r}: {empty[0]}: [] is empty; list at least one value, or remove the key")
    return axes


def credentials_in_sweep(definition: TestDefinition, run: TestRun) -> Iterator[str]:
    """Yield a line for every credential among the axes and patterns, whose values are names of points and columns."""
    for name, values in find_axes(definition, run).items():
        if is_secret(name) or any(map(_is_credential, values)):
            yield f"test {run.id!r}: {path_of(name)} is a credential and cannot be an axis; give one value"
    patterns = [*definition.sweep.include, *definition.sweep.exclude]
    named = set()
    for name, value in (pair for pattern in patterns for pair in pattern.items()):
        values = tuple(value) if isinstance(value, list) else (value,)
        if is_secret(name.removeprefix(ENV)) or any(map(_is_credential, values)):
            named.add(name)
    for name in sorted(named):
        yield f"test {run.id!r}: sweep: {name} is a credential and cannot be a coordinate; remove it"


def _is_credential(value: Any) -> bool:
    return isinstance(value, str) and find_credential(value) is not None


def _is_axis(value: Any, path: str, definition: TestDefinition) -> bool:
    """Return whether a value is an axis: a list, unless its path or a parent is excluded. Only arguments hold lists."""
    excluded = any(path == prefix or path.startswith(f"{prefix}.") for prefix in definition.dse_excluded_args)
    if excluded and isinstance(value, list) and not path.startswith("cmd_args."):
        raise BadInput(f"dse_excluded_args: {path} cannot be a list; take it out, or give one value")
    return isinstance(value, list) and not excluded


Values = tuple[Any, ...]

MOST_POINTS = 10_000_000


@dataclass(frozen=True)
class Grid:
    """The product of dimensions; a dimension is one axis, or several that vary together.

    names: the axes in the order of a value tuple. dimensions: per dimension its rows, each a tuple of axis values.
    positions: per dimension, where its values stand in a value tuple.
    """

    names: tuple[str, ...]
    dimensions: tuple[tuple[Values, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    exclude: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    seed: int | None = None

    @property
    def size(self) -> int:
        """Number of points before exclusion."""
        return math.prod(len(rows) for rows in self.dimensions)

    def __iter__(self) -> Iterator[Values]:
        """Yield the values of every point that is not excluded; BadInput after ten million points."""
        points = itertools.islice(self._all(), MOST_POINTS)
        yield from (values for values in points if not self._is_excluded(values)) if self.exclude else points
        if self.size > MOST_POINTS:
            raise BadInput(
                f"sweep over {', '.join(self.names)}: {self.size} points are too many, {MOST_POINTS} were looked at;"
                " shorten an axis, or set sweep.max_points"
            )

    def _all(self) -> Iterator[Values]:
        if self.seed is not None:
            return (self._arranged(row) for row in self._shuffled(self.seed))
        if all(len(positions) == 1 for positions in self.positions):
            return itertools.product(*([value for (value,) in rows] for rows in self.dimensions))
        return (self._arranged(row) for row in itertools.product(*self.dimensions))

    def _arranged(self, row: Sequence[Values]) -> Values:
        values: list[Any] = [None] * len(self.names)
        for positions, group in zip(self.positions, row, strict=True):
            for position, value in zip(positions, group, strict=True):
                values[position] = value
        return tuple(values)

    def has(self, values: Values) -> bool:
        """Return whether these values are a point of the grid, and not an excluded one."""
        rows = [tuple(values[position] for position in positions) for positions in self.positions]
        on_axes = all(row in known for row, known in zip(rows, self.dimensions, strict=True))
        return on_axes and not self._is_excluded(values)

    def sample(self, draw: random.Random) -> Values:
        """Return the values of a random point."""
        return self._arranged([draw.choice(rows) for rows in self.dimensions])

    def _shuffled(self, seed: int) -> Iterator[tuple[Values, ...]]:
        """Visit every index once in an order that looks random: i -> (a*i + b) mod size, with a coprime to the size."""
        size, draw = self.size, random.Random(seed)  # noqa: S311 - an order, no secret
        step = next((a for a in iter(lambda: draw.randrange(1, size + 1), None) if math.gcd(a, size) == 1), 1)
        start = draw.randrange(size)
        for i in range(size):
            yield self._row((step * i + start) % size)

    def _row(self, index: int) -> tuple[Values, ...]:
        row = []
        for rows in reversed(self.dimensions):
            index, digit = divmod(index, len(rows))
            row.append(rows[digit])
        return tuple(reversed(row))

    def _is_excluded(self, values: Values) -> bool:
        point = dict(zip(self.names, values, strict=True))
        return any(all(point[name] in allowed for name, allowed in pattern.items()) for pattern in self.exclude)


def build_grid(axes: Mapping[str, Sequence[Any]], config: SweepConfig, where: str) -> Grid:
    """Combine the axes as the sweep defines. Duplicate values of an axis are used once.

    BadInput: a zip or exclude names no axis, or zipped axes have different lengths.
    """
    names = list(axes)
    leader = {name: group for group in config.zip for name in group}
    _check_zip(config.zip, axes, where)
    dimensions, positions, done = [], [], set()
    for name in names:
        if name in done:
            continue
        group = leader.get(name, [name])
        done.update(group)
        rows = zip(*(axes[member] for member in group), strict=True)
        dimensions.append(tuple(dict.fromkeys(rows)))
        positions.append(tuple(names.index(member) for member in group))
    return Grid(
        names=tuple(names),
        dimensions=tuple(dimensions),
        positions=tuple(positions),
        exclude=tuple(_excluded(pattern, axes, where) for pattern in config.exclude),
        seed=config.seed if config.order == "random" else None,
    )


def _check_zip(groups: Sequence[Sequence[str]], axes: Mapping[str, Sequence[Any]], where: str) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group:
            _require_axis(name, axes, f"{where}: sweep.zip")
            if name in seen:
                raise BadInput(f"{where}: sweep.zip: {name!r} is in two groups; name it once")
            seen.add(name)
        lengths = {name: len(axes[name]) for name in group}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise BadInput(f"{where}: sweep.zip: axes of different length ({shown}); give them equally many values")


def _excluded(pattern: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], where: str) -> dict[str, tuple[Any, ...]]:
    if not pattern:
        raise BadInput(f"{where}: sweep.exclude: an empty pattern would leave out every point; remove it")
    for name in pattern:
        _require_axis(name, axes, f"{where}: sweep.exclude")
    wanted = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in pattern.items()}
    for name, values in wanted.items():
        for value in values:
            if value not in axes[name]:
                known = ", ".join(map(repr, axes[name]))
                raise BadInput(f"{where}: sweep.exclude: {value!r} is not a value of {name}; its values are {known}")
    return wanted


def _require_axis(name: str, axes: Mapping[str, Sequence[Any]], where: str) -> None:
    if name not in axes:
        raise BadInput(f"{where}: {name!r} is not an axis; axes are {', '.join(axes) or 'none'}")


@dataclass(frozen=True)
class SweepPoint:
    """One combination. `coordinates` maps the axes' names to this point's values; empty for a test without axes."""

    test_id: str
    label: str
    args: ResolvedCmdArgs
    env: Mapping[str, str]
    num_nodes: int | None
    coordinates: Mapping[str, Any]


class SweepSpace:
    """The points of one test: a grid, and the points that `[sweep] include` adds."""

    def __init__(self, definition: TestDefinition, run: TestRun) -> None:
        if problems := list(credentials_in_sweep(definition, run)):
            raise BadInput("\n".join(problems))
        self._definition, self._run = definition, run
        self.axes = find_axes(definition, run)
        self.grid = build_grid(self.axes, definition.sweep, f"test {run.id!r}")
        self._paths = {name: path_of(name) for name in self.axes}
        written = {name: getattr(definition.cmd_args, name) for name in definition.cmd_args.model_fields_set}
        self._fixed = {name: value for name, value in written.items() if f"cmd_args.{name}" not in self._paths.values()}

    @property
    def num_nodes(self) -> int | None:
        """The scenario's number of nodes, unless it is an axis."""
        return None if isinstance(self._run.num_nodes, list) else self._run.num_nodes

    @property
    def env(self) -> dict[str, str]:
        """The test's variables that are not axes."""
        return {name: value for name, value in self._definition.extra_env_vars.items() if isinstance(value, str)}

    def base_args(self) -> ResolvedCmdArgs:
        """Return the arguments that all points share."""
        return self._resolve(self._fixed)

    def coordinates(self, values: Values) -> dict[str, Any]:
        return dict(zip(self.grid.names, values, strict=True))

    def point(self, coordinates: Mapping[str, Any]) -> SweepPoint:
        """Return the point at these coordinates, every axis named."""
        chosen = {self._paths.get(name, f"cmd_args.{name}"): value for name, value in coordinates.items()}
        env = {name: chosen.get(f"extra_env_vars.{name}", v) for name, v in self._definition.extra_env_vars.items()}
        args = {path.removeprefix("cmd_args."): v for path, v in chosen.items() if path.startswith("cmd_args.")}
        return SweepPoint(
            test_id=self._run.id,
            label=label(coordinates),
            args=self._resolve({**self._fixed, **args}),
            env={name: str(value) for name, value in env.items()},
            num_nodes=chosen.get(NUM_NODES, self._run.num_nodes),
            coordinates=dict(coordinates),
        )

    def included(self) -> Iterator[SweepPoint]:
        """Yield the added points that are new; axes that they do not name take their first value."""
        first = {name: values[0] for name, values in self.axes.items()}
        seen: set[str] = set()
        for pattern in self._definition.sweep.include:
            for name in pattern:
                if name not in first and name not in ResolvedCmdArgs.model_fields:
                    raise BadInput(f"test {self._run.id!r}: sweep.include: {name!r} is neither an axis nor an argument")
            point = self.point({**first, **pattern})
            coordinates = {name: getattr(point.args, name, value) for name, value in point.coordinates.items()}
            name, names = label(coordinates), self.grid.names
            is_in_grid = coordinates.keys() == set(names) and self.grid.has(tuple(coordinates[axis] for axis in names))
            if name not in seen and not is_in_grid:
                seen.add(name)
                yield self.point(coordinates)

    def _resolve(self, args: Mapping[str, Any]) -> ResolvedCmdArgs:
        try:
            return ResolvedCmdArgs.model_validate(dict(args))
        except ValidationError as error:
            detail = error.errors()[0]
            where = f"test {self._run.id!r}: cmd_args.{detail['loc'][0]}"
            if isinstance(detail["input"], list):
                raise BadInput(f"{where}: cannot be a list here; take it out of dse_excluded_args") from None
            raise BadInput(f"{where}: {detail['msg']}") from None


def expand(definition: TestDefinition, run: TestRun) -> Iterator[SweepPoint]:
    """Yield the points of the Cartesian product, last axis fastest, then the included points."""
    sweep = SweepSpace(definition, run)
    for values in sweep.grid:
        yield sweep.point(sweep.coordinates(values))
    yield from sweep.included()
