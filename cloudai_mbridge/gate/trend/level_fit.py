"""Fit levels to a series between given edges, in logarithms, and test the difference between neighbours.

Outliers are clipped before squaring: centres are means of clipped runs, and the noise is the larger of two robust
estimates. Levels do not explain a slow drift, or a last run far outside its level; both are tested separately.

Source: Mann and Kendall's test and Theil and Sen's slope, as in https://doi.org/10.1080/01621459.1968.10480934.
"""

import math
from dataclasses import dataclass
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

Floats = NDArray[np.float64]


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


def _center(part: Floats, noise: float) -> float:
    middle = np.median(part)
    return float(np.mean(np.clip(part, middle - 2 * noise, middle + 2 * noise)))


def fit_levels(edges: tuple[int, ...], y: Floats, noise: float) -> LevelFit:
    """Fit levels between the edges. noise: a first estimate, for clipping."""
    parts = [y[a:b] for a, b in pairwise(edges)]
    centers = np.array([_center(part, noise) for part in parts])
    residuals = y - np.repeat(centers, np.diff(edges))
    freedom = max(len(y) - len(parts), 1)
    spread = max(spread_of(residuals) * math.sqrt(len(y) / freedom), NOISE_FLOOR)
    clipped = np.clip(residuals, -OUTLIER * spread, OUTLIER * spread)
    spread = max(spread, math.sqrt(float(np.sum(clipped**2)) / freedom))
    inflation = inflation_of(clipped, len(parts))
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


def inflation_of(residuals: Floats, num_levels: int) -> float:
    """Return the inflation of a mean's standard error by autocorrelation. The estimate is low by half an error."""
    total = float(np.sum(residuals**2))
    if total == 0:
        return 1.0
    n = len(residuals)
    lag_one = float(np.sum(residuals[1:] * residuals[:-1])) / total
    phi = min(max(lag_one + 0.5 * (1 / math.sqrt(n) + num_levels / n), 0.0), _MAX_AUTOCORRELATION)
    return math.sqrt((1 + phi) / (1 - phi))


def spread_of(values: Floats) -> float:
    """Return the standard deviation of values around zero, estimated robustly by their median."""
    return 1.4826 * float(np.median(np.abs(values)))


def despiked(y: Floats, noise: float) -> Floats:
    """Clip values far from the median of the five runs around them. A level of three runs or more is kept."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, mode="reflect"), 5)
    medians = np.median(around, axis=1)
    return np.clip(y, medians - 2.5 * noise, medians + 2.5 * noise)


@dataclass(frozen=True)
class Departure:
    """The last run, or the last few, far outside the level: not yet a level. change: relative to the level.

    back_to: as of a LevelShift.
    """

    index: int
    change: float
    back_to: int | None = None


@dataclass(frozen=True)
class LevelDrift:
    """A slow change of the runs from `start` on that no step explains. per_run: relative."""

    start: int
    per_run: float


def find_drift(y: Floats, noise: float, min_effect: float, steps: LevelFit) -> float | None:
    """Return the change per run if a drift explains the runs better than the steps, or any single step."""
    if len(y) < MIN_DRIFT_RUNS or len({math.copysign(1, change) for change in np.diff(steps.centers)}) > 1:
        return None
    per_run = _monotone_slope(y)
    if per_run is None or abs(math.expm1(per_run * (len(y) - 1))) < min_effect:
        return None
    if len(steps.edges) == 2:
        steps = _best_single_step(y, noise)
    line = y - per_run * np.arange(len(y))
    cost = _cost(line - np.median(line), noise) + 2 * math.log(len(y))
    cost_of_steps = _cost(steps.residuals(y), noise) + (len(steps.edges) * 2 - 3) * math.log(len(y))
    return per_run if cost < cost_of_steps else None


def _cost(residuals: Floats, noise: float) -> float:
    return float(np.sum(np.minimum((residuals / noise) ** 2, 9.0)))


def _best_single_step(y: Floats, noise: float) -> LevelFit:
    clipped = despiked(y, noise)
    n = np.arange(1, len(y))
    sums = np.cumsum(clipped)
    gain = sums[:-1] ** 2 / n + (sums[-1] - sums[:-1]) ** 2 / (len(y) - n)
    place = MIN_LEVEL_RUNS + int(np.argmax(gain[MIN_LEVEL_RUNS - 1 : len(y) - MIN_LEVEL_RUNS]))
    return fit_levels((0, place, len(y)), y, noise)


def _monotone_slope(y: Floats) -> float | None:
    """Return the median slope if Mann and Kendall's test, widened for autocorrelation, is significant."""
    n, time = len(y), np.arange(len(y))
    if not _may_be_monotone(y):
        return None
    first, second = np.triu_indices(n, 1)
    rises = y[second] - y[first]
    z = abs(float(np.sign(rises).sum())) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    if z <= _DRIFT_Z:
        return None
    slope = float(np.median(rises / (second - first)))
    residuals = y - slope * time
    residuals = residuals - np.median(residuals)
    limit = 3 * max(spread_of(residuals), NOISE_FLOOR)
    return slope if z / inflation_of(np.clip(residuals, -limit, limit), 2) > _DRIFT_Z else None


def _may_be_monotone(y: Floats) -> bool:
    """Return whether Spearman's correlation is near the threshold; it agrees with Kendall's, and is cheap."""
    n = len(y)
    ranks = np.empty(n)
    ranks[np.argsort(y, kind="stable")] = np.arange(n)
    middle = (n - 1) / 2
    correlation = float(np.sum((ranks - middle) * (np.arange(n) - middle))) * 12 / (n * (n**2 - 1))
    return abs(correlation) * math.sqrt(n - 1) > _DRIFT_Z - 1


def find_departure(residuals: Floats, min_effect: float) -> Departure | None:
    """Find a departure of the last few runs, else of fewer: each far out, and further than any run of the level."""
    for count in range(_MAX_DEPARTURE_RUNS, 0, -1):
        level, last = residuals[:-count], residuals[-count:]
        if len(level) < _MIN_DEPARTURE_RUNS or not (np.all(last > 0) or np.all(last < 0)):
            continue
        noise = max(spread_of(level), math.sqrt(float(np.mean(level**2))), NOISE_FLOOR)
        limit, further = (4.5, 2.0) if count == 1 else (3.5, 1.0)
        limit *= (1 + 6 / len(level)) * math.sqrt(1 + 1 / len(level))
        nearest = float(np.min(np.abs(last)))
        change = math.expm1(float(np.mean(last)))
        if nearest > max(limit * noise, further * float(np.max(np.abs(level)))) and abs(change) >= min_effect:
            return Departure(len(level), change)
    return None
