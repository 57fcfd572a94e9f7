"""A metric over all points of a gate together: shared noise, nodes and nights, and the common change.

Every point is judged by its change beyond the common change, with noise estimated from all points (`statistics.py`) and
the effects of slow nodes removed (`slow_nodes.py`). Two changes are tested in addition to single points: the common
change, and the change of each group beyond the rest.

Nights are one more kind of noise, shared by all runs of a night. If a side has several nights, the noise between nights
is estimated from them. They are few, so p-values are averaged over the posterior of this noise, with a prior
probability of one half that nights do not differ.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from cloudai_mbridge.gate.runs import METRICS, PointRuns
from cloudai_mbridge.gate.slow_nodes import find_slow_nodes, night_numbers
from cloudai_mbridge.gate.statistics import (
    FEW_RUNS,
    NOISE_OF_FEW,
    Comparison,
    SharedSpread,
    SkewedSpread,
    comparison_of,
    growth,
    shared_spreads,
    skewness,
)

FEWEST_POINTS = 10  # fewer do not determine a common change
_FEWEST_OF_A_GROUP, _MOST_GROUPS = 3, 60
_FAR_NOISIER = 3.0
_MOST = 0.8  # share of points that must be alike for a common change
_OUTLYING = 3.5  # standard errors; a point this far from the middle is an outlier
_VARIANCE_OF_A_MEDIAN = math.pi / 2  # over that of a mean
_MANY = 1e9  # degrees of freedom: a normal distribution
_NIGHT_NOISES = np.array([0.0, *np.geomspace(0.0005, 0.03, 13)])
_NIGHTS_ARE_EQUAL = 0.5  # prior probability


@dataclass(frozen=True)
class SharedChange:
    """Shared change of points. group: their common fact, such as "args.tp = 8"; "" for all points.

    alike: how many of them are near the change. comparison: its p-values are of what all points changed by, or a group
    beyond the rest; 1 where too few are alike. rest: the relative change of the rest.
    """

    group: str
    points: tuple[str, ...]
    alike: int
    comparison: Comparison
    rest: float = 0.0


def _facts(point: PointRuns) -> dict[str, str]:
    fields = point.reference.comparability if point.reference else {}
    known = {name: str(value) for name, value in fields.items() if isinstance(value, str | int | float)}
    return {"test": point.point.partition("/")[0], **known}


def _is_usable(point: PointRuns, metric: str) -> bool:
    old, new = ([run.values[metric] for run in side if metric in run.values] for side in (point.old, point.good))
    return (
        min(len(old), len(new)) > 1
        and all(len(curve) == 1 for curve in (*old, *new))
        and all(math.isfinite(curve[0]) and curve[0] > 0 for curve in (*old, *new))
        and all(len({curve[0] for curve in side}) > 1 for side in (old, new))
    )


class Suite:
    """comparisons: by point. common, groups: what all points changed by, and groups of them. nodes: their effects.

    nights: of the reference and of the result, 0 if runs lack their end. night_noise: relative, None if unknown.

    All runs are in the order of points, the old before the new. Cells: twice the point's number, and one if new.
    """

    def __init__(self, points: Sequence[PointRuns], metric: str, confidence: float, differing: Collection[str]) -> None:
        self._points, self._confidence, self._differing = points, confidence, differing
        found = [
            (math.log(run.values[metric][0]), 2 * number + side, run)
            for number, point in enumerate(points)
            for side, runs in enumerate((point.old, point.good))
            for run in runs
            if metric in run.values
        ]
        values, self._cells = np.array([value for value, _, _ in found]), np.array([cell for _, cell, _ in found])
        self._ended = [run.ended_at for _, _, run in found]
        self._sizes = np.bincount(self._cells, minlength=2 * len(points)).reshape(-1, 2)
        self._degrees = self._sizes.sum(axis=1) - 2.0
        sign = METRICS[metric].direction.worse[0]  # a slow node makes times larger, and rates smaller
        run_nodes = tuple(run.nodes for _, _, run in found)
        self.nodes = find_slow_nodes(sign * values, self._cells, run_nodes, np.ones(len(values)))
        if self.nodes.slow:  # again, as the noise of points can be estimated only without them
            variances, _ = self._spread(values - sign * self.nodes.of_runs)
            middle = float(np.median(variances))
            sds = np.sqrt(np.clip(variances, middle / 4, middle * 4))[self._cells // 2]
            self.nodes = find_slow_nodes(sign * values, self._cells, run_nodes, sds)
        self._values = values - sign * self.nodes.of_runs
        variances, self._means = self._spread(self._values)
        self._differences = self._means[:, 1] - self._means[:, 0]
        self._find_noise(variances)
        self.nights, self.night_noise, noises, weights, shares = self._compare_nights()
        extra = float(weights @ noises**2) * shares
        self.comparisons = {point.point: self._comparison(i, extra) for i, point in enumerate(points)}
        chosen = np.flatnonzero(self._keeps)
        mean, variance = self._mean(chosen)
        spread = _normal(np.sqrt(variance + noises**2 * shares), weights)
        common = self._shared_change(mean, spread, spread, is_one=_are_alike(self._keeps))
        self.common = SharedChange("", tuple(point.point for point in points), len(chosen), common)
        self.groups = tuple(self._groups())

    @property
    def nights_are_confounded(self) -> bool:
        """Whether the sides are of different nights, without an estimate of the noise between nights."""
        return self.night_noise is None and min(self.nights) > 0

    def _spread(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return per point the variance of its runs around the means of their sides, and these means."""
        num = len(self._points)
        means = np.bincount(self._cells, values, 2 * num) / self._sizes.ravel()
        squares = np.bincount(self._cells // 2, (values - means[self._cells]) ** 2, num)
        return squares / self._degrees, means.reshape(-1, 2)

    def _find_noise(self, variances: np.ndarray) -> None:
        """Estimate the noise of every point, the certain part of the common change, and the skewness."""
        num = len(self._points)
        factors = (1 / self._sizes).sum(axis=1)
        least = np.where(self._sizes.min(axis=1) < FEW_RUNS, NOISE_OF_FEW, 0.0)
        doubts = np.array([self.nodes.variance(self._contrast(i)) for i in range(num)])
        self._typical, (without, self._spreads) = shared_spreads(
            variances, self._degrees, factors, least, (np.zeros(num), doubts)
        )
        self._variances = np.array([float(s.weights @ s.errors**2) for s in without]) + doubts
        self._sds = np.sqrt((self._variances - doubts) / factors)
        middle = _weighted_median(self._differences, 1 / self._variances)
        self._keeps = np.abs(self._differences - middle) <= _OUTLYING * np.sqrt(self._variances)
        # The certain part of the common change: its uncertainty must not count against a point
        doubt = 2 * math.sqrt(_VARIANCE_OF_A_MEDIAN / float((1 / self._variances).sum()))
        sure = max(0.0, abs(middle) - doubt) if _are_alike(self._keeps) else 0.0
        self._shared = math.copysign(sure, middle)
        # Of runs around the means of their sides, without points that are far noisier
        usual = np.flatnonzero(self._sds <= _FAR_NOISIER * self._typical)
        self._skewness = skewness(
            [self._values[self._cells == 2 * i + side] / self._typical for i in usual for side in (0, 1)]
        )

    def _contrast(self, point: int) -> np.ndarray:
        """Return the weights of the runs in the point's difference."""
        weights = np.zeros(len(self._values))
        for side, sign in ((0, -1.0), (1, 1.0)):
            weights[self._cells == 2 * point + side] = sign / self._sizes[point, side]
        return weights

    def _comparison(self, point: int, extra: float) -> Comparison:
        """Compare a point: the change is the point's own, the p-values are of its excess over the common change."""
        old, new = (float(mean) for mean in self._means[point])
        difference, spread = new - old, self._spreads[point]
        num_old, num_new = (int(size) for size in self._sizes[point])
        scale = max(self._sds[point], self._typical)
        # With equally many runs on both sides, the skewness cancels out
        skewed = (
            [SkewedSpread(scale, self._skewness, num_new, num_old)] if self._skewness and num_new != num_old else []
        )
        reach = SharedSpread(spread.weights, np.sqrt(spread.errors**2 + extra), spread.degrees).reach(self._confidence)
        beyond = difference - max(self._shared, 0.0), difference - min(self._shared, 0.0)
        p_larger = max(spread.tail(beyond[0]), *(s.tail(beyond[0]) for s in skewed), 0.0)
        p_smaller = max(spread.tail(-beyond[1]), *(s.mirrored().tail(-beyond[1]) for s in skewed), 0.0)
        return comparison_of(old, new, reach, p_larger, p_smaller, (spread, *skewed))

    def _mean(self, chosen: np.ndarray) -> tuple[float, float]:
        """Return the weighted mean change of points, and its variance, at least as large as their scatter implies."""
        weights = 1 / self._variances[chosen]
        total = float(weights.sum())
        mean = float(weights @ self._differences[chosen]) / total
        if len(chosen) < 2:
            return mean, 1 / total
        scatter = float(weights @ (self._differences[chosen] - mean) ** 2) / (len(chosen) - 1)
        return mean, max(1.0, scatter) / total

    def _groups(self) -> list[SharedChange]:
        """Return the changes of points with a common test or comparability field, beyond those of the rest."""
        members: dict[str, set[int]] = {}
        for i, point in enumerate(self._points):
            facts = _facts(point).items()
            for group in sorted(f"{name} = {value}" for name, value in facts if name in self._differing):
                members.setdefault(group, set()).add(i)
        names: dict[frozenset[int], list[str]] = {}
        for name, inside in members.items():
            if min(len(inside), len(self._points) - len(inside)) >= _FEWEST_OF_A_GROUP:
                names.setdefault(frozenset(inside), []).append(name)
        return [self._group(inside, named) for inside, named in list(names.items())[:_MOST_GROUPS]]

    def _group(self, inside: frozenset[int], names: Sequence[str]) -> SharedChange:
        is_in = np.array([i in inside for i in range(len(self._points))])
        sides, near = [], []
        for chosen in (is_in, ~is_in):
            middle = _weighted_median(self._differences[chosen], 1 / self._variances[chosen])
            is_near = np.abs(self._differences - middle) <= _OUTLYING * np.sqrt(self._variances)
            near.append(is_near[chosen])
            sides.append(self._mean(np.flatnonzero(chosen & is_near)))
        (mean, variance), (rest, variance_of_rest) = sides
        own, beyond = (_normal(np.array([math.sqrt(v)]), np.ones(1)) for v in (variance, variance + variance_of_rest))
        return SharedChange(
            " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else ""),
            tuple(self._points[i].point for i in sorted(inside)),
            int(near[0].sum()),
            self._shared_change(mean, own, beyond, rest, is_one=all(map(_are_alike, near))),
            growth(rest),
        )

    def _shared_change(
        self, mean: float, own: SharedSpread, beyond: SharedSpread, rest: float = 0.0, *, is_one: bool
    ) -> Comparison:
        """Compare points together. own: the spread of the mean; beyond: of its excess over the rest.

        is_one: most points are near the mean, so it is a common change.
        """
        p_larger = beyond.tail(mean - max(rest, 0.0)) if is_one else 1.0
        p_smaller = beyond.tail(-(mean - min(rest, 0.0))) if is_one else 1.0
        return comparison_of(0.0, mean, own.reach(self._confidence), p_larger, p_smaller, (beyond,))

    def _compare_nights(self) -> tuple[tuple[int, int], float | None, np.ndarray, np.ndarray, float]:
        """Return the nights of both sides, the noise between nights, and its share in the common change.

        Before the share: the possible noises, and their weights.
        """
        night_of = night_numbers(self._ended)
        sides = self._cells % 2
        sds = self._sds[self._cells // 2]
        residuals = self._values - self._means.ravel()[self._cells]
        logs, counts, shares = np.zeros(len(_NIGHT_NOISES)), [0, 0], 0.0
        for side in (0, 1):
            chosen = (sides == side) & (night_of >= 0)
            numbers = np.unique(night_of[chosen])
            counts[side] = len(numbers)
            if not len(numbers):
                continue
            runs = [chosen & (night_of == number) for number in numbers]
            weights = np.array([(1 / sds[run] ** 2).sum() for run in runs])
            shares += float(((weights / weights.sum()) ** 2).sum())
            if len(numbers) < 2:
                continue
            means = np.array([np.average(residuals[run], weights=1 / sds[run] ** 2) for run in runs])
            variances = _NIGHT_NOISES[:, None] ** 2 + 1 / weights
            centers = (means / variances).sum(axis=1) / (1 / variances).sum(axis=1)
            squares = ((means - centers[:, None]) ** 2 / variances).sum(axis=1)
            logs -= (np.log(variances).sum(axis=1) + np.log((1 / variances).sum(axis=1)) + squares) / 2
        if max(counts) < 2:
            are_same = len(np.unique(night_of[night_of >= 0])) == 1
            return (0, 0) if are_same else (counts[0], counts[1]), None, np.zeros(1), np.ones(1), 0.0
        rest = len(_NIGHT_NOISES) - 1
        prior = np.array([_NIGHTS_ARE_EQUAL, *[(1 - _NIGHTS_ARE_EQUAL) / rest] * rest])
        weights = prior * np.exp(logs - logs.max())
        weights /= weights.sum()
        noise = float(np.sqrt(weights @ _NIGHT_NOISES**2))
        return (counts[0], counts[1]), noise, _NIGHT_NOISES, weights, shares


def compare_suite(points: Sequence[PointRuns], metric: str, confidence: float) -> Suite | None:
    """Compare a metric of one positive value per run over all points with two or more distinct values on each side.

    points: comparable ones. None if there are too few.
    """
    usable = [point for point in points if _is_usable(point, metric)]
    if len(usable) < FEWEST_POINTS:
        return None
    values: dict[str, set[str]] = {}
    for name, value in (fact for point in points for fact in _facts(point).items()):
        values.setdefault(name, set()).add(value)
    return Suite(usable, metric, confidence, {name for name, found in values.items() if len(found) > 1})


def _are_alike(near: np.ndarray) -> bool:
    return bool(near.mean() >= _MOST)


def _normal(errors: np.ndarray, weights: np.ndarray) -> SharedSpread:
    return SharedSpread(weights, errors, np.full(len(errors), _MANY))


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(shares, 0.5)])
