"""What levels do not explain: a slow drift, and a last run far outside its level. On logarithms.

Source: Mann and Kendall's test and Theil and Sen's slope, as in https://doi.org/10.1080/01621459.1968.10480934.
"""

import math
from dataclasses import dataclass

import numpy as np

from cloudai_mbridge.gate.trend.level_fit import (
    MIN_LEVEL_RUNS,
    NOISE_FLOOR,
    Fit,
    Floats,
    despiked,
    fit_levels,
    inflation_of,
    spread_of,
)

MIN_DRIFT_RUNS = 20
_DRIFT_Z = 3.7
_MIN_DEPARTURE_RUNS = 5
_MAX_DEPARTURE_RUNS = 4


@dataclass(frozen=True)
class Departure:
    """The last run, or the last few, far outside the level: not yet a level. change: relative to the level.

    back_to: as of a LevelShift.
    """

    index: int
    change: float
    back_to: int | None = None


@dataclass(frozen=True)
class Drift:
    """A slow change of the runs from `start` on that no step explains. per_run: relative."""

    start: int
    per_run: float


def find_drift(y: Floats, noise: float, min_effect: float, steps: Fit) -> float | None:
    """Return the change per run if there is one that explains the runs better than the steps, or any one step, do."""
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


def _best_single_step(y: Floats, noise: float) -> Fit:
    clipped = despiked(y, noise)
    n = np.arange(1, len(y))
    sums = np.cumsum(clipped)
    gain = sums[:-1] ** 2 / n + (sums[-1] - sums[:-1]) ** 2 / (len(y) - n)
    place = MIN_LEVEL_RUNS + int(np.argmax(gain[MIN_LEVEL_RUNS - 1 : len(y) - MIN_LEVEL_RUNS]))
    return fit_levels((0, place, len(y)), y, noise)


def _monotone_slope(y: Floats) -> float | None:
    """Return the median slope if Mann and Kendall's test, widened for autocorrelation, sees a trend."""
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
    """Return whether Spearman's correlation comes near what is needed; it agrees with Kendall's, and is cheap."""
    n = len(y)
    ranks = np.empty(n)
    ranks[np.argsort(y, kind="stable")] = np.arange(n)
    middle = (n - 1) / 2
    correlation = float(np.sum((ranks - middle) * (np.arange(n) - middle))) * 12 / (n * (n**2 - 1))
    return abs(correlation) * math.sqrt(n - 1) > _DRIFT_Z - 1


def find_departure(residuals: Floats, min_effect: float) -> Departure | None:
    """Look at the last few runs, then at fewer: each far out, and further than any run of the level was."""
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
