"""The most informative points first: the best of every way to split the model, then every value of every axis once.

So even a truncated queue shows the best split and the effect of each axis. The points are iterated twice, and only
the leading points are kept.
"""

from collections.abc import Callable, Iterator
from typing import Any

from cloudai_mbridge.sweep.checked import CheckedPoint

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
