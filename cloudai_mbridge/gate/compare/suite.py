"""A metric over all points of a gate together: shared noise, nodes and nights, and the common change.

Every point is judged by its change beyond the common change, with noise estimated from all points
(`statistics/noise.py`) and the effects of slow nodes removed (`statistics/slow_nodes.py`). Two changes are tested in
addition to single points: the common change, and the change of each group beyond the rest.

Nights are one more kind of noise, shared by all runs of a night. If a side has several nights, the noise between nights
is estimated from them. They are few, so p-values are averaged over the posterior of this noise, with a prior
probability of one half that nights do not differ.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloudai_mbridge.gate.compare.reference import RunValues
from cloudai_mbridge.gate.results.values import METRICS
from cloudai_mbridge.gate.statistics.comparison import Comparison, growth
from cloudai_mbridge.gate.statistics.nights import night_numbers
from cloudai_mbridge.gate.statistics.noise import SharedSpread, SkewedSpread, shared_noise, skewness
from cloudai_mbridge.gate.statistics.slow_nodes import NodeEffects, find_slow_nodes

FEWEST_POINTS = 10  # fewer do not determine a common change
_FEWEST_OF_A_GROUP, _MOST_GROUPS = 3, 60
_FEW_RUNS, _NOISE_OF_FEW = 3, 0.01  # as in statistics/comparison.py
_FAR_NOISIER = 3.0
_MOST = 0.8  # share of points that must be alike for a common change
_OUTLYING = 3.5  # standard errors; a point this far from the middle is an outlier
_VARIANCE_OF_A_MEDIAN = math.pi / 2  # over that of a mean
_MANY = 1e9  # degrees of freedom: a normal distribution
_NIGHT_NOISES = np.array([0.0, *np.geomspace(0.0005, 0.03, 13)])
_NIGHTS_ARE_EQUAL = 0.5  # prior probability


@dataclass(frozen=True)
class SuitePoint:
    """A point's runs on both sides. groups: facts shared with others, such as "args.tp = 8"."""

    point: str
    old: Sequence[RunValues]
    new: Sequence[RunValues]
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SharedChange:
    """Shared change of points. group: their common fact, "" for all points.

    alike: how many of them are near the change. comparison: its p-values are of what all points changed by, or a group
    beyond the rest; 1 where too few are alike. rest: the relative change of the rest.
    """

    group: str
    points: tuple[str, ...]
    alike: int
    comparison: Comparison
    rest: float = 0.0


@dataclass(frozen=True)
class Nights:
    """old, new: the nights of a side, 0 if runs lack their end. noise: relative, None if unknown."""

    old: int
    new: int
    noise: float | None

    @property
    def are_confounded(self) -> bool:
        """Whether the sides are of different nights, without an estimate of the noise between nights."""
        return self.noise is None and self.old > 0 and self.new > 0


@dataclass(frozen=True)
class Suite:
    """comparisons: by point. noise: typical relative standard deviation between runs."""

    comparisons: Mapping[str, Comparison]
    common: SharedChange
    groups: tuple[SharedChange, ...]
    nodes: NodeEffects
    nights: Nights
    noise: float


@dataclass(frozen=True, eq=False)
class _Runs:
    """All runs, in the order of points, the old before the new. cells: twice the point's number, and one if new."""

    values: np.ndarray
    cells: np.ndarray
    nodes: tuple[tuple[str, ...], ...]
    ended: tuple[str, ...]

    def of(self, point: int, side: int) -> np.ndarray:
        return np.flatnonzero(self.cells == 2 * point + side)


def compare_suite(points: Sequence[SuitePoint], metric: str, confidence: float) -> Suite | None:
    """Compare a metric of one positive value per run over all points with two or more distinct values on each side.

    None if there are too few points.
    """
    usable = [point for point in points if _is_usable(point, metric)]
    if len(usable) < FEWEST_POINTS:
        return None
    runs = _collect(usable, metric)
    sign = METRICS[metric].direction.worse[0]  # a slow node makes times larger, and rates smaller
    nodes = find_slow_nodes(sign * runs.values, runs.cells, runs.nodes, np.ones(len(runs.values)))
    if nodes.slow:  # again, as the noise of points can be estimated only without them
        variances, _ = _variances(runs.values - sign * nodes.of_runs, runs, len(usable))
        middle = float(np.median(variances))
        sds = np.sqrt(np.clip(variances, middle / 4, middle * 4))[runs.cells // 2]
        nodes = find_slow_nodes(sign * runs.values, runs.cells, runs.nodes, sds)
    values = runs.values - sign * nodes.of_runs
    variances, degrees = _variances(values, runs, len(usable))
    return _Fit(usable, runs, values, nodes, variances, degrees, confidence).suite()


def _is_usable(point: SuitePoint, metric: str) -> bool:
    old, new = ([run.values[metric] for run in side if metric in run.values] for side in (point.old, point.new))
    values = [value for side in (old, new) for curve in side for value in curve]
    return (
        min(len(old), len(new)) > 1
        and all(len(curve) == 1 for curve in (*old, *new))
        and all(math.isfinite(value) and value > 0 for value in values)
        and all(len({curve[0] for curve in side}) > 1 for side in (old, new))
    )


def _collect(points: Sequence[SuitePoint], metric: str) -> _Runs:
    found = [
        (math.log(run.values[metric][0]), 2 * number + side, run)
        for number, point in enumerate(points)
        for side, runs in enumerate((point.old, point.new))
        for run in runs
        if metric in run.values
    ]
    return _Runs(
        np.array([value for value, _, _ in found]),
        np.array([cell for _, cell, _ in found]),
        tuple(run.nodes for _, _, run in found),
        tuple(run.ended_at for _, _, run in found),
    )


def _variances(values: np.ndarray, runs: _Runs, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return per point the variance of its runs around the means of their sides, and its degrees of freedom."""
    sizes = np.bincount(runs.cells, minlength=2 * num_points)
    means = np.bincount(runs.cells, values, 2 * num_points) / sizes
    squares = np.bincount(runs.cells // 2, (values - means[runs.cells]) ** 2, num_points)
    degrees = sizes.reshape(-1, 2).sum(axis=1) - 2.0
    return squares / degrees, degrees


class _Fit:
    def __init__(
        self,
        points: Sequence[SuitePoint],
        runs: _Runs,
        values: np.ndarray,
        nodes: NodeEffects,
        variances: np.ndarray,
        degrees: np.ndarray,
        confidence: float,
    ) -> None:
        self._points, self._runs, self._values, self._nodes = points, runs, values, nodes
        self._confidence = confidence
        num = len(points)
        sizes = np.bincount(runs.cells, minlength=2 * num).reshape(-1, 2)
        means = (np.bincount(runs.cells, values, 2 * num) / sizes.ravel()).reshape(-1, 2)
        self._sizes, self._means = sizes, means
        self._differences = means[:, 1] - means[:, 0]
        factors = (1 / sizes).sum(axis=1)
        noise = shared_noise(variances, degrees)
        self._typical = noise.typical
        least = np.where(sizes.min(axis=1) < _FEW_RUNS, _NOISE_OF_FEW, 0.0)
        doubts = np.array([nodes.variance(self._contrast(i)) for i in range(num)])
        self._of_one = [
            noise.spread(variances[i], degrees[i], factors[i], 0.0, least[i]) for i in range(num)
        ]  # without shared effects
        self._variances = np.array([float(s.weights @ s.errors**2) for s in self._of_one]) + doubts
        self._sds = np.sqrt((self._variances - doubts) / factors)
        self._middle = _weighted_median(self._differences, 1 / self._variances)
        self._keeps = np.abs(self._differences - self._middle) <= _OUTLYING * np.sqrt(self._variances)
        self._spreads = [noise.spread(variances[i], degrees[i], factors[i], doubts[i], least[i]) for i in range(num)]
        # The certain part of the common change: its uncertainty must not count against a point
        doubt = 2 * math.sqrt(_VARIANCE_OF_A_MEDIAN / float((1 / self._variances).sum()))
        sure = max(0.0, abs(self._middle) - doubt) if _are_alike(self._keeps) else 0.0
        self._shared = math.copysign(sure, self._middle)
        self._skewness = self._find_skewness()

    def suite(self) -> Suite:
        nights, noises, weights, shares = self._nights()
        extra = float(weights @ noises**2) * shares
        common = self._common(noises, weights, shares)
        return Suite(
            {point.point: self._comparison(i, extra) for i, point in enumerate(self._points)},
            common,
            tuple(self._groups()),
            self._nodes,
            nights,
            self._typical,
        )

    def _contrast(self, point: int) -> np.ndarray:
        """Return the weights of the runs in the point's difference."""
        weights = np.zeros(len(self._values))
        for side, sign in ((0, -1.0), (1, 1.0)):
            runs = self._runs.of(point, side)
            weights[runs] = sign / len(runs)
        return weights

    def _find_skewness(self) -> float:
        """Return the skewness of runs around the means of their sides, without points that are far noisier."""
        usual = np.flatnonzero(self._sds <= _FAR_NOISIER * self._typical)
        return skewness(
            [self._values[self._runs.of(i, side)] / self._typical for i in map(int, usual) for side in (0, 1)]
        )

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
        absolute = SharedSpread(spread.weights, np.sqrt(spread.errors**2 + extra), spread.degrees)
        reach = absolute.reach(self._confidence)
        beyond = difference - max(self._shared, 0.0), difference - min(self._shared, 0.0)
        return Comparison(
            baseline=math.exp(old),
            value=math.exp(new),
            change=growth(difference),
            lower=growth(difference - reach),
            upper=growth(difference + reach),
            p_larger=max(spread.tail(beyond[0]), *(s.tail(beyond[0]) for s in skewed), 0.0),
            p_smaller=max(spread.tail(-beyond[1]), *(s.mirrored().tail(-beyond[1]) for s in skewed), 0.0),
            spreads=(spread, *skewed),
        )

    def _mean(self, chosen: np.ndarray) -> tuple[float, float]:
        """Return the weighted mean change of points, and its variance, at least as large as their scatter implies."""
        weights = 1 / self._variances[chosen]
        total = float(weights.sum())
        mean = float(weights @ self._differences[chosen]) / total
        if len(chosen) < 2:
            return mean, 1 / total
        scatter = float(weights @ (self._differences[chosen] - mean) ** 2) / (len(chosen) - 1)
        return mean, max(1.0, scatter) / total

    def _common(self, noises: np.ndarray, weights: np.ndarray, shares: float) -> SharedChange:
        chosen = np.flatnonzero(self._keeps)
        mean, variance = self._mean(chosen)
        spread = _normal(np.sqrt(variance + noises**2 * shares), weights)
        change = self._shared_change(mean, spread, spread, is_one=_are_alike(self._keeps))
        return SharedChange("", tuple(point.point for point in self._points), len(chosen), change)

    def _groups(self) -> list[SharedChange]:
        members: dict[str, set[int]] = {}
        for i, point in enumerate(self._points):
            for group in sorted(point.groups):
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
        is_one = all(map(_are_alike, near))
        (mean, variance), (rest, variance_of_rest) = sides
        own, beyond = (_normal(np.array([math.sqrt(v)]), np.ones(1)) for v in (variance, variance + variance_of_rest))
        return SharedChange(
            " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else ""),
            tuple(self._points[i].point for i in sorted(inside)),
            int(near[0].sum()),
            self._shared_change(mean, own, beyond, rest, is_one=is_one),
            growth(rest),
        )

    def _shared_change(
        self, mean: float, own: SharedSpread, beyond: SharedSpread, rest: float = 0.0, *, is_one: bool
    ) -> Comparison:
        """Compare points together. own: the spread of the mean; beyond: of its excess over the rest.

        is_one: most points are near the mean, so it is a common change.
        """
        reach = own.reach(self._confidence)
        return Comparison(
            baseline=1.0,
            value=math.exp(mean),
            change=growth(mean),
            lower=growth(mean - reach),
            upper=growth(mean + reach),
            p_larger=beyond.tail(mean - max(rest, 0.0)) if is_one else 1.0,
            p_smaller=beyond.tail(-(mean - min(rest, 0.0))) if is_one else 1.0,
            spreads=(beyond,),
        )

    def _nights(self) -> tuple[Nights, np.ndarray, np.ndarray, float]:
        """Return the nights, possible noises between nights, their weights, and their share in the common change."""
        night_of = night_numbers(self._runs.ended)
        sides = self._runs.cells % 2
        sds = self._sds[self._runs.cells // 2]
        residuals = self._values - self._means.ravel()[self._runs.cells]
        logs, counts, shares = np.zeros(len(_NIGHT_NOISES)), [0, 0], 0.0
        is_known = False
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
            is_known = True
            means = np.array([np.average(residuals[run], weights=1 / sds[run] ** 2) for run in runs])
            variances = _NIGHT_NOISES[:, None] ** 2 + 1 / weights
            centers = (means / variances).sum(axis=1) / (1 / variances).sum(axis=1)
            squares = ((means - centers[:, None]) ** 2 / variances).sum(axis=1)
            logs -= (np.log(variances).sum(axis=1) + np.log((1 / variances).sum(axis=1)) + squares) / 2
        if not is_known:
            are_same = len(np.unique(night_of[night_of >= 0])) == 1
            nights = Nights(0, 0, None) if are_same else Nights(counts[0], counts[1], None)
            return nights, np.zeros(1), np.ones(1), 0.0
        rest = len(_NIGHT_NOISES) - 1
        prior = np.array([_NIGHTS_ARE_EQUAL, *[(1 - _NIGHTS_ARE_EQUAL) / rest] * rest])
        weights = prior * np.exp(logs - logs.max())
        weights /= weights.sum()
        return Nights(counts[0], counts[1], float(np.sqrt(weights @ _NIGHT_NOISES**2))), _NIGHT_NOISES, weights, shares


def _are_alike(near: np.ndarray) -> bool:
    return bool(near.mean() >= _MOST)


def _normal(errors: np.ndarray, weights: np.ndarray) -> SharedSpread:
    return SharedSpread(weights, errors, np.full(len(errors), _MANY))


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(shares, 0.5)])
