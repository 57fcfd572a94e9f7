"""Old against new: a row per point for one metric, and the geometric mean of the changes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from cloudai_mbridge.gate.compare.groups import group_by_point
from cloudai_mbridge.gate.compare.metric import noise_of
from cloudai_mbridge.gate.compare.verdict import GateResult, GateVerdict, MetricVerdict, PointVerdict
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS, Direction

COMPARABLE_METRICS = tuple(name for name, metric in METRICS.items() if metric.direction is not Direction.SAME)
FAILED, INCOMPLETE, ONLY_OLD, ONLY_NEW = "failed", "incomplete", "only in old", "only in new"


@dataclass(frozen=True)
class ComparedPoint:
    """A point on both sides.

    excluded: the reason why it is not in the mean; "" if it is.
    old, new: geometric means over the good runs, None if unknown.
    old_noise, new_noise: relative standard deviations between runs, None for one run.
    change: relative, None if it could not be compared.
    is_significant: whether the change is significant after the correction for all points and metrics.
    """

    point: str
    excluded: str
    old: float | None
    new: float | None
    old_noise: float | None
    new_noise: float | None
    change: float | None
    is_significant: bool
    num_old: int
    num_new: int


@dataclass(frozen=True)
class ComparisonTable:
    """All points of two results, for one metric.

    excluded: number of points that are not in the mean, by reason.
    old, new, change: geometric means over the others, None without any.
    """

    metric: str
    unit: str
    points: tuple[ComparedPoint, ...]
    excluded: Mapping[str, int]
    old: float | None
    new: float | None
    change: float | None


@dataclass(frozen=True)
class _Side:
    """One of the results: the metric's values of the good runs by point, and the points with failed runs."""

    values: Mapping[str, Sequence[float]]
    failed: frozenset[str]

    def numbers(self, point: str) -> tuple[float | None, float | None, int]:
        """Return the mean, the noise, and the number of runs."""
        values = self.values.get(point, ())
        return (geometric_mean(values) if values else None), noise_of(values), len(values)


def tabulate(result: GateResult, metric: str, old: Sequence[RunResult], new: Sequence[RunResult]) -> ComparisonTable:
    """Return the table of a metric, in the order of the runs. result: of the comparison of these runs."""
    before, after = _side(metric, old), _side(metric, new)
    points = [_row(point, metric, before, after) for point in result.points]
    known = {point.point for point in points}
    points += [_unmatched(name, before, after, FAILED) for name in sorted(before.failed) if name not in known]
    order = {name: place for place, name in enumerate(dict.fromkeys(run.point for run in (*old, *new)))}
    points.sort(key=lambda point: order[point.point])
    reasons = [point.excluded for point in points if point.excluded]
    pairs = [(p.old, p.new, p.change) for p in points if not p.excluded]
    olds, news, changes = zip(*pairs, strict=True) if pairs else ((), (), ())
    return ComparisonTable(
        metric=metric,
        unit=METRICS[metric].unit,
        points=tuple(points),
        excluded={reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
        old=_mean(olds),
        new=_mean(news),
        change=math.expm1(fmean(math.log1p(change) for change in changes)) if changes else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None


def _side(metric: str, runs: Iterable[RunResult]) -> _Side:
    points, _ = group_by_point(runs)
    found = {point.point: [METRICS[metric].of(run) for run in point.good] for point in points}
    values = {name: [value[0] for value in of_runs if value] for name, of_runs in found.items()}
    return _Side(values, frozenset(point.point for point in points if point.failed))


def _row(point: PointVerdict, name: str, before: _Side, after: _Side) -> ComparedPoint:
    metric = next((metric for metric in point.metrics if metric.metric == name), None)
    excluded = _excluded(point, metric, before, after)
    if metric is None or metric.change is None:
        return _unmatched(point.point, before, after, excluded)
    return ComparedPoint(
        point=point.point,
        excluded=excluded,
        old=metric.baseline,
        new=metric.value,
        old_noise=metric.baseline_noise,
        new_noise=metric.noise,
        change=metric.change,
        is_significant=metric.is_significant,
        num_old=metric.num_baseline_runs,
        num_new=metric.num_runs,
    )


def _unmatched(name: str, before: _Side, after: _Side, excluded: str) -> ComparedPoint:
    (old, old_noise, num_old), (new, new_noise, num_new) = before.numbers(name), after.numbers(name)
    return ComparedPoint(name, excluded, old, new, old_noise, new_noise, None, False, num_old, num_new)


def _excluded(point: PointVerdict, metric: MetricVerdict | None, before: _Side, after: _Side) -> str:
    """Return the reason why a point is not in the mean, "" if it is."""
    name = point.point
    sides = [side for side in (before, after) if name in side.failed]
    if sides:
        return INCOMPLETE if all(side.values.get(name) for side in sides) else FAILED
    if name not in after.values:
        return ONLY_OLD
    if metric is not None and metric.verdict is not GateVerdict.NOT_RUN and metric.change is not None:
        return ""
    is_new = name not in before.values and metric is None
    return ONLY_NEW if is_new else str((metric or point).verdict)
