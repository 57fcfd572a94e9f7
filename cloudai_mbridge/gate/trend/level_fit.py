"""Levels fitted to a series between given edges, in logarithms, and how surely neighbours differ.

Nothing here squares an outlier: centres are means of clipped runs, and the noise is the larger of two robust estimates.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MIN_LEVEL_RUNS = 3
NOISE_FLOOR = 5e-4  # of repeated values, which have no noise of their own
_CLIP = 4.0  # of a run of a short level, in standard deviations
_GAP = 4.0  # between levels of which no run comes near the other: nothing is left to test
OUTLIER = 6.0  # standard deviations from which on further makes no difference
_MAX_AUTOCORRELATION = 0.8

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """Levels between `edges` (0, ..., n), in logarithms. strengths: of every inner edge, in standard errors."""

    edges: tuple[int, ...]
    centers: Floats
    noise: float
    inflation: float
    strengths: Floats

    def parts(self, values: Floats) -> list[Floats]:
        return [values[a:b] for a, b in pairwise(self.edges)]

    def residuals(self, values: Floats) -> Floats:
        return values - np.repeat(self.centers, np.diff(self.edges))

    def error(self, i: int) -> float:
        """Return the standard error of the difference between level i and the next."""
        before, after = self.edges[i + 1] - self.edges[i], self.edges[i + 2] - self.edges[i + 1]
        return self.noise * self.inflation * math.sqrt(1 / before + 1 / after)


def _center(part: Floats, noise: float) -> float:
    middle = np.median(part)
    return float(np.mean(np.clip(part, middle - 2 * noise, middle + 2 * noise)))


def fit_levels(edges: tuple[int, ...], y: Floats, noise: float) -> Fit:
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
    return Fit(edges, centers, spread, inflation, np.array(strengths))


def _difference(before: Floats, after: Floats, centers: Floats, noise: float) -> float:
    """Return the smaller of the distances of each side's runs to the other's level, no run counting for too much."""
    limit = _CLIP * noise * max(1.0, min(len(before), len(after)) / 5)
    if max(before.min() - after.max(), after.min() - before.max()) > _GAP * noise:
        return math.inf
    there = abs(float(np.mean(np.clip(after - centers[0], -limit, limit))))
    back = abs(float(np.mean(np.clip(before - centers[1], -limit, limit))))
    return min(there, back)


def inflation_of(residuals: Floats, num_levels: int) -> float:
    """Return by what autocorrelation widens the standard error of a mean. The estimate is low by half an error."""
    total = float(np.sum(residuals**2))
    if total == 0:
        return 1.0
    n = len(residuals)
    lag_one = float(np.sum(residuals[1:] * residuals[:-1])) / total
    phi = min(max(lag_one + 0.5 * (1 / math.sqrt(n) + num_levels / n), 0.0), _MAX_AUTOCORRELATION)
    return math.sqrt((1 + phi) / (1 - phi))


def spread_of(values: Floats) -> float:
    """Return the standard deviation of values around zero by their median: outliers do not count."""
    return 1.4826 * float(np.median(np.abs(values)))


def despiked(y: Floats, noise: float) -> Floats:
    """Clip what is far from the median of the five runs around it. A level of three runs or more stays."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(y, 2, mode="reflect"), 5)
    medians = np.median(around, axis=1)
    return np.clip(y, medians - 2.5 * noise, medians + 2.5 * noise)
