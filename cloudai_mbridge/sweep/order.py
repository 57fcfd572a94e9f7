"""The most informative points first: the best of every way to split the model, then every value of every axis once.

So even a queue that is cut short shows which split is best, and what each axis does. The points are gone
through twice, and only the leading ones are kept.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudai_mbridge.sweep.checked import CheckedPoint

_SPLIT = ("tp", "pp")
_Key = tuple[Any, ...]


def informative(
    points: Callable[[], Iterator[CheckedPoint]], speed: Callable[[CheckedPoint], float | None]
) -> Iterator[CheckedPoint]:
    """Yield all points, the leading ones first, the others in their order.

    speed: predicted tokens/s/GPU of a point that breaks no rule, 0 where it is not known; None: it cannot lead.
    """
    best = _Best()
    for point in points():
        if not point.violations and (rate := speed(point)) is not None:
            best.add(point, rate)
    leading = best.in_order()
    yield from leading
    first = {_key(point.coordinates) for point in leading}
    for point in points():
        if _key(point.coordinates) not in first:
            yield point


class _Best:
    """The fastest point of every (tp, pp), and of every value of every axis; of equal ones the first."""

    def __init__(self) -> None:
        self._splits: dict[_Key, tuple[float, CheckedPoint]] = {}
        self._values: dict[_Key, tuple[float, CheckedPoint]] = {}

    def add(self, point: CheckedPoint, rate: float) -> None:
        """Look at a point."""
        coordinates = point.coordinates
        _keep(self._splits, tuple([coordinates.get(name) for name in _SPLIT]), rate, point)
        for name, value in coordinates.items():
            _keep(self._values, (name, _hashable(value)), rate, point)

    def in_order(self) -> list[CheckedPoint]:
        """Return the best of the splits, fastest first, then what the axes' values add that no point before has."""
        order = [point for _, point in sorted(self._splits.values(), key=lambda one: -one[0])]
        covered = {value for point in order for value in _values(point.coordinates)}
        for value, (_, point) in sorted(self._values.items(), key=lambda one: -one[1][0]):
            if value not in covered:
                order.append(point)
                covered.update(_values(point.coordinates))
        return order


def _keep(best: dict[_Key, tuple[float, CheckedPoint]], key: _Key, rate: float, point: CheckedPoint) -> None:
    if key not in best or rate > best[key][0]:
        best[key] = (rate, point)


def _values(coordinates: Mapping[str, Any]) -> list[_Key]:
    return [(name, _hashable(value)) for name, value in coordinates.items()]


def _key(coordinates: Mapping[str, Any]) -> _Key:
    return tuple(_values(coordinates))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
