"""The points of a sweep as value tuples, made one at a time: a million of them never exist together."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.test_definition import SweepConfig
from cloudai_mbridge.sweep.axes import Axis

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


def build_grid(axes: Sequence[Axis], config: SweepConfig, where: str) -> Grid:
    """Combine the axes as the sweep defines. Duplicate values of an axis are used once.

    BadInput: a zip or exclude names no axis, or zipped axes have different lengths.
    """
    names = [axis.name for axis in axes]
    by_name = {axis.name: axis for axis in axes}
    leader = {name: group for group in config.zip for name in group}
    _check_zip(config.zip, by_name, where)
    dimensions, positions, done = [], [], set()
    for name in names:
        if name in done:
            continue
        group = leader.get(name, [name])
        done.update(group)
        rows = zip(*(by_name[member].values for member in group), strict=True)
        dimensions.append(tuple(dict.fromkeys(rows)))
        positions.append(tuple(names.index(member) for member in group))
    return Grid(
        names=tuple(names),
        dimensions=tuple(dimensions),
        positions=tuple(positions),
        exclude=tuple(_pattern(pattern, by_name, where) for pattern in config.exclude),
        seed=config.seed if config.order == "random" else None,
    )


def _check_zip(groups: Sequence[Sequence[str]], axes: Mapping[str, Axis], where: str) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group:
            _require_axis(name, axes, f"{where}: sweep.zip")
            if name in seen:
                raise BadInput(f"{where}: sweep.zip: {name!r} is in two groups; name it once")
            seen.add(name)
        lengths = {name: len(axes[name].values) for name in group}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise BadInput(f"{where}: sweep.zip: axes of different length ({shown}); give them equally many values")


def _pattern(pattern: Mapping[str, Any], axes: Mapping[str, Axis], where: str) -> dict[str, tuple[Any, ...]]:
    if not pattern:
        raise BadInput(f"{where}: sweep.exclude: an empty pattern would leave out every point; remove it")
    for name in pattern:
        _require_axis(name, axes, f"{where}: sweep.exclude")
    wanted = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in pattern.items()}
    for name, values in wanted.items():
        for value in values:
            if value not in axes[name].values:
                known = ", ".join(map(repr, axes[name].values))
                raise BadInput(f"{where}: sweep.exclude: {value!r} is not a value of {name}; its values are {known}")
    return wanted


def _require_axis(name: str, axes: Mapping[str, Axis], where: str) -> None:
    if name not in axes:
        raise BadInput(f"{where}: {name!r} is not an axis; axes are {', '.join(axes) or 'none'}")
