"""Levels of a series: change points, drift, departure of the last runs. Numbers only, in logarithms.

ruptures proposes change points, by least squares with clipped spikes. A proposal is kept if its levels differ by more
than `min_effect`, and by more standard errors than a threshold that covers all places. The threshold was calibrated by
simulation (tests/benchmarks/history.py): normal, heavy-tailed, skewed and autocorrelated noise. The noise is the spread
of the runs around their own levels, so a step does not hide itself.

Outliers are clipped before squaring: centres are means of clipped runs, and the noise is the larger of two robust
estimates. Levels do not explain a slow drift, or a last run far outside its level; both are tested separately.

Sources: Killick et al. 2012 (https://doi.org/10.1080/01621459.2012.737745) for the penalised search; Hansen 2000
(https://doi.org/10.1111/1468-0262.00124) for the range of places; Mann and Kendall's test and Theil and Sen's slope, as
in https://doi.org/10.1080/01621459.1968.10480934.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MIN_LEVEL_RUNS = 3
NOISE_FLOOR = 5e-4  # of repeated values, which have zero noise
_CLIP = 4.0  # of a run of a short level, in standard deviations
_GAP = 4.0  # between the runs of two levels: beyond it, no test is needed
OUTLIER = 6.0  # standard deviations; larger residuals are clipped
_MAX_AUTOCORRELATION = 0.8
MIN_DRIFT_RUNS = 20
_DRIFT_Z = 3.7
_MIN_DEPARTURE_RUNS = 5
_MAX_DEPARTURE_RUNS = 4
MIN_EFFECT = 0.01
MIN_RUNS = 8  # fewer cannot show two levels of at least three runs
_PENALTY = 2.0  # times log(n): low, since proposals are tested
_PLACE_LIKELIHOOD = 7.35  # 95 % of Hansen's likelihood ratio
_ASSUMED_Z = 4.5

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LevelShift:
    """A change of level, or the departure of the last run, or the last few, far from the level: not yet a level.

    index: the first run of the new level. earliest, latest: where it may have been as well (95 %). change: relative,
    positive = larger; interval: of it (95 %), None of a departure. back_to: index of the step that left the level which
    is back, if one is.
    """

    index: int
    earliest: int
    latest: int
    before: float
    after: float
    change: float
    interval: tuple[float, float] | None
    back_to: int | None = None


@dataclass(frozen=True)
class Levels:
    """Levels of a series. unknown: reason for no result, else "". noise: relative standard deviation of a run,
    None where it was assumed.

    starts: the first run of every level; values: the levels, of one that drifts where it started. now: the last one.
    drift: the first run of a slow change that no step explains, and the relative change per run.
    """

    unknown: str = ""
    noise: float | None = None
    starts: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    now: float | None = None
    steps: tuple[LevelShift, ...] = ()
    departure: LevelShift | None = None
    drift: tuple[int, float] | None = None


@dataclass(frozen=True)
class LevelFit:
    """Levels between `edges` (0, ..., n), in logarithms. strengths: of every inner edge, in standard errors."""

    edges: tuple[int, ...]
    centers: Floats
    noise: float
    inflation: float
    strengths: Floats

    def residuals(self, values: Floats) -> Floats:
        return values - np.repeat(self.centers, np.diff(self.edges))

    def error(self, i: int) -> float:
        """Return the standard error of the difference between level i and the next."""
        before, after = self.edges[i + 1] - self.edges[i], self.edges[i + 2] - self.edges[i + 1]
        return self.noise * self.inflation * math.sqrt(1 / before + 1 / after)


def _fit_levels(edges: tuple[int, ...], y: Floats, noise: float) -> LevelFit:
    """Fit levels between the edges. noise: a first estimate, for clipping."""
    parts = [y[a:b] for a, b in pairwise(edges)]
    middles = [np.median(part) for part in parts]
    clipped_parts = [np.clip(part, c - 2 * noise, c + 2 * noise) for part, c in zip(parts, middles, strict=True)]
    centers = np.array([float(np.mean(part)) for part in clipped_parts])
    residuals = y - np.repeat(centers, np.diff(edges))
    freedom = max(len(y) - len(parts), 1)
    spread = max(_spread_of(residuals) * math.sqrt(len(y) / freedom), NOISE_FLOOR)
    clipped = np.clip(residuals, -OUTLIER * spread, OUTLIER * spread)
    spread = max(spread, math.sqrt(float(np.sum(clipped**2)) / freedom))
    inflation = _inflation_of(clipped, len(parts))
    strengths = [
        _difference(a, b, centers[i : i + 2], spread) / (spread * inflation * math.sqrt(1 / len(a) + 1 / len(b)))
        for i, (a, b) in enumerate(pairwise(parts))
    ]
    return LevelFit(edges, centers, spread, inflation, np.array(strengths))


def _difference(before: Floats, after: Floats, centers: Floats, noise: float) -> float:
    """Return the smaller of the mean distances of each side's runs to the other side's level, clipped per run."""
    limit = _CLIP * noise * max(1.0, min(len(before), len(after)) / 5)
    if max(before.min() - after.max(), after.min() - before.max()) > _GAP * noise:
        return math.inf
    there = abs(float(np.mean(np.clip(after - centers[0], -limit, limit))))
    back = abs(float(np.mean(np.clip(before - centers[1], -limit, limit))))
    return min(there, back)


def _inflation_of(residuals: Floats, num_levels: int) -> float:
    """Return the inflation of a mean's standard error by autocorrelation. The estimate is low by half an error."""
    total = float(np.sum(residuals**2))
    if total == 0:
        return 1.0
    n = len(residuals)
    lag_one = float(np.sum(residuals[1:] * residuals[:-1])) / total
    phi = min(max(lag_one + 0.5 * (1 / math.sqrt(n) + num_levels / n), 0.0), _MAX_AUTOCORRELATION)
    return math.sqrt((1 + phi) / (1 - phi))


def _spread_of(values: Floats) -> float:
    """Return the standard deviation of values around zero, estimated robustly by their median."""
    return 1.4826 * float(np.median(np.abs(values)))


def _despiked(y: Floats, noise: float) -> Floats:
    """Clip values far from the median of the five runs around them. A level of three runs or more is kept."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, mode="reflect"), 5)
    medians = np.median(around, axis=1)
    return np.clip(y, medians - 2.5 * noise, medians + 2.5 * noise)


def _find_drift(y: Floats, noise: float, min_effect: float, steps: LevelFit) -> float | None:
    """Return the change per run if a drift explains the runs better than the steps, or any single step."""
    if len(y) < MIN_DRIFT_RUNS or len({math.copysign(1, change) for change in np.diff(steps.centers)}) > 1:
        return None
    per_run = _monotone_slope(y)
    if per_run is None or abs(math.expm1(per_run * (len(y) - 1))) < min_effect:
        return None
    if len(steps.edges) == 2:  # the best single step
        n, sums = np.arange(1, len(y)), np.cumsum(_despiked(y, noise))
        gain = sums[:-1] ** 2 / n + (sums[-1] - sums[:-1]) ** 2 / (len(y) - n)
        place = MIN_LEVEL_RUNS + int(np.argmax(gain[MIN_LEVEL_RUNS - 1 : len(y) - MIN_LEVEL_RUNS]))
        steps = _fit_levels((0, place, len(y)), y, noise)
    line = y - per_run * np.arange(len(y))
    cost = _cost(line - np.median(line), noise) + 2 * math.log(len(y))
    cost_of_steps = _cost(steps.residuals(y), noise) + (len(steps.edges) * 2 - 3) * math.log(len(y))
    return per_run if cost < cost_of_steps else None


def _cost(residuals: Floats, noise: float) -> float:
    return float(np.sum(np.minimum((residuals / noise) ** 2, 9.0)))


def _monotone_slope(y: Floats) -> float | None:
    """Return the median slope if Mann and Kendall's test, widened for autocorrelation, is significant."""
    n, time = len(y), np.arange(len(y))
    ranks = np.empty(n)
    ranks[np.argsort(y, kind="stable")] = time
    middle = (n - 1) / 2
    correlation = float(np.sum((ranks - middle) * (time - middle))) * 12 / (n * (n**2 - 1))
    if abs(correlation) * math.sqrt(n - 1) <= _DRIFT_Z - 1:  # Spearman's agrees with Kendall's, and is cheap
        return None
    first, second = np.triu_indices(n, 1)
    rises = y[second] - y[first]
    z = abs(float(np.sign(rises).sum())) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    if z <= _DRIFT_Z:
        return None
    slope = float(np.median(rises / (second - first)))
    residuals = y - slope * time
    residuals = residuals - np.median(residuals)
    limit = 3 * max(_spread_of(residuals), NOISE_FLOOR)
    return slope if z / _inflation_of(np.clip(residuals, -limit, limit), 2) > _DRIFT_Z else None


def _find_departure(residuals: Floats, min_effect: float) -> tuple[int, float] | None:
    """Find a departure of the last few runs, else of fewer: each far out, and further than any run of the level.

    Return its first run and the relative change.
    """
    for count in range(_MAX_DEPARTURE_RUNS, 0, -1):
        level, last = residuals[:-count], residuals[-count:]
        if len(level) < _MIN_DEPARTURE_RUNS or not (np.all(last > 0) or np.all(last < 0)):
            continue
        noise = max(_spread_of(level), math.sqrt(float(np.mean(level**2))), NOISE_FLOOR)
        limit, further = (4.5, 2.0) if count == 1 else (3.5, 1.0)
        limit *= (1 + 6 / len(level)) * math.sqrt(1 + 1 / len(level))
        nearest = float(np.min(np.abs(last)))
        change = math.expm1(float(np.mean(last)))
        if nearest > max(limit * noise, further * float(np.max(np.abs(level)))) and abs(change) >= min_effect:
            return len(level), change
    return None


def find_levels(
    values: Sequence[float], *, min_effect: float = MIN_EFFECT, assumed_noise: float | None = None
) -> Levels:
    """Find the levels of positive values, in order.

    assumed_noise: relative standard deviation of a run, for series too short to estimate it.
    """
    if any(not (math.isfinite(value) and value > 0) for value in values):
        return Levels(unknown="values that are not positive have no relative change")
    y = np.log(np.asarray(values, dtype=np.float64))
    if len(y) < MIN_RUNS:
        if assumed_noise and len(y) > 1:
            return replace(_levels(_fit_assumed(y, assumed_noise, min_effect), y, min_effect), noise=None)
        return Levels(unknown=f"{len(y)} runs are too few to tell a change from noise; {MIN_RUNS} are needed")
    from ruptures import KernelCPD  # not at the top: it imports all of scipy.stats, which takes most of a second

    noise = max(_spread_of(np.diff(y)) / math.sqrt(2), NOISE_FLOOR)
    # The edges that minimise squared distances to the levels, plus a penalty for each edge
    search = KernelCPD(kernel="linear", min_size=MIN_LEVEL_RUNS).fit((_despiked(y, noise) / noise)[:, None])
    proposed = (0, *map(int, search.predict(pen=_PENALTY * math.log(len(y)))))
    fit = _place(_pruned(proposed, y, noise, min_effect), y, noise)
    for i, start in enumerate(fit.edges[:-1]):  # the earliest level from which a drift explains more than steps
        edges = tuple(edge - start for edge in fit.edges[i:])
        per_run = _find_drift(y[start:], noise, min_effect, _fit_levels(edges, y[start:], noise))
        if per_run is not None:
            y = y - per_run * np.maximum(np.arange(len(y)) - start, 0)
            fit = _fit_levels((*(edge for edge in fit.edges if edge <= start), len(y)), y, noise)
            return _levels(fit, y, min_effect, (start, per_run))
    return _levels(fit, y, min_effect)


def threshold(num_runs: int) -> float:
    """Return the detection threshold for a step among `num_runs` runs, in standard errors."""
    return 4.7 + 0.23 * math.log2(max(num_runs, 20) / 20)


def _levels(fit: LevelFit, y: Floats, min_effect: float, drift: tuple[int, float] | None = None) -> Levels:
    """Convert a fit of values without drift to levels of runs."""
    start = fit.edges[-2]
    values = tuple(math.exp(center) for center in fit.centers.tolist())
    now = values[-1] * (1.0 if drift is None else math.exp(drift[1] * (len(y) - 1 - start)))
    departure = None
    if found := _find_departure(fit.residuals(y)[start:], min_effect):
        index, change = found[0] + start, found[1]
        back_to = _near_level(fit, float(fit.centers[-1]) + math.log1p(change), len(y) - index, min_effect)
        departure = LevelShift(index, index, index, now, now * (1 + change), change, None, back_to)
    return Levels(
        noise=fit.noise,
        starts=fit.edges[:-1],
        values=values,
        now=now,
        steps=tuple(_shift(fit, y, i, min_effect) for i in range(len(values) - 1)),
        departure=departure,
        drift=drift,
    )


def _pruned(edges: tuple[int, ...], y: Floats, noise: float, min_effect: float) -> LevelFit:
    """Remove the weakest edge until all remaining edges are significant and large enough."""
    fit, limit = _fit_levels(edges, y, noise), threshold(len(y))
    while len(fit.strengths):
        effects = np.abs(np.expm1(np.diff(fit.centers)))
        bad = np.flatnonzero((fit.strengths < limit) | (effects < min_effect))
        if not len(bad):
            break
        weakest = int(bad[np.argmin(fit.strengths[bad])])
        fit = _fit_levels(fit.edges[: weakest + 1] + fit.edges[weakest + 2 :], y, noise)
    return fit


def _place(fit: LevelFit, y: Floats, noise: float) -> LevelFit:
    """Move every edge to the best place between its neighbours."""
    edges = list(fit.edges)
    for i in range(len(edges) - 2):
        costs = _place_costs(fit, y, i)
        first = fit.edges[i]
        low, high = max(edges[i], first) + MIN_LEVEL_RUNS, edges[i + 2] - MIN_LEVEL_RUNS
        if low <= high:
            edges[i + 1] = low + int(np.argmin(costs[low - first : high - first + 1]))
    return fit if tuple(edges) == fit.edges else _fit_levels(tuple(edges), y, noise)


def _place_costs(fit: LevelFit, y: Floats, i: int) -> Floats:
    """Return the cost of an edge between levels i and i + 1 at every place from the start of one to the other's end."""
    part = y[fit.edges[i] : fit.edges[i + 2]]
    before, after = (np.minimum(((part - c) / fit.noise) ** 2, OUTLIER**2) for c in fit.centers[i : i + 2])
    left = np.concatenate(([0.0], np.cumsum(before)))
    right = np.concatenate((np.cumsum(after[::-1])[::-1], [0.0]))
    return left + right


def _shift(fit: LevelFit, y: Floats, i: int, min_effect: float) -> LevelShift:
    index, first = fit.edges[i + 1], fit.edges[i]
    costs = _place_costs(fit, y, i) / fit.inflation**2
    likely = np.flatnonzero(costs <= costs[index - first] + _PLACE_LIKELIHOOD)
    likely = likely[(likely > 0) & (likely < len(costs) - 1)]
    before, after = (float(center) for center in fit.centers[i : i + 2])
    margin, change = 2 * fit.error(i), after - before
    earlier = replace(fit, edges=fit.edges[: i + 2], centers=fit.centers[: i + 1])
    return LevelShift(
        index=index,
        earliest=min(first + int(likely[0]), index) if len(likely) else index,
        latest=max(first + int(likely[-1]), index) if len(likely) else index,
        before=math.exp(before),
        after=math.exp(after),
        change=math.expm1(change),
        interval=(math.expm1(change - margin), math.expm1(change + margin)),
        back_to=_near_level(earlier, after, fit.edges[i + 2] - index, min_effect),
    )


def _near_level(fit: LevelFit, value: float, num_runs: int, min_effect: float) -> int | None:
    """Return the first run after the latest earlier level that matches a mean of `num_runs` runs, None without one."""
    left_by = abs(math.expm1(value - fit.centers[-1]))
    for j in range(len(fit.centers) - 2, -1, -1):
        length = fit.edges[j + 1] - fit.edges[j]
        error = fit.noise * fit.inflation * math.sqrt(1 / num_runs + 1 / length)
        if abs(math.expm1(value - fit.centers[j])) <= min(min_effect + 3 * error, left_by / 2):
            return fit.edges[j + 1]
    return None


def _fit_assumed(y: Floats, noise: float, min_effect: float) -> LevelFit:
    """Fit levels, of single runs if need be, under a known noise."""
    edges = [0]
    for i in range(1, len(y)):
        level = y[edges[-1] : i]
        distance = abs(y[i] - level.mean())
        if distance > _ASSUMED_Z * noise * math.sqrt(1 + 1 / len(level)) and math.expm1(distance) >= min_effect:
            edges.append(i)
    edges.append(len(y))
    centers = np.array([y[a:b].mean() for a, b in pairwise(edges)])
    return LevelFit(tuple(edges), centers, noise, 1.0, np.zeros(len(centers) - 1))
