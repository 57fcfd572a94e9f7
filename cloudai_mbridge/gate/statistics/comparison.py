"""Compare two groups of runs: relative change, confidence bounds, p-values, detectable change.

Values are compared as logarithms, so that changes are relative and the noise of a faster run is the same share of it.
Each run is one value: steps within a run are correlated, and even a thousand steps do not show the noise between runs.
With two runs or more on both sides, a change has to pass two t-tests: Welch's, which errs for few runs against many
with normal noise, and Student's, which errs for few runs against many with skewed noise; each is safe if the other is
not. A single run is compared with the prediction for one more run from five runs or more of the other side. It might be
an outlier, for example on a slow node, so it must be unlikely under any distribution of that spread (Cantelli's
inequality).

Sources: Welch, Biometrika 34 (1947); Hahn and Meeker, Statistical Intervals (1991), prediction of one observation;
Cantelli's one-sided form of Chebyshev's inequality. tests/benchmarks/gate_curves.py measures the error rates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri, stdtr, stdtrit

_POWER = 0.8
_FEWEST_TO_PREDICT = 5
# Two runs hardly determine their spread, and five may all have missed the slow node of a single run
_FEW, _FLOOR_OF_FEW = 3, 0.01


class Reach(Protocol):
    """How sure a difference of log means is."""

    def tail(self, difference: float) -> float:
        """Return the one-sided p-value of a difference."""

    def reach(self, confidence: float) -> float:
        """Return the one-sided margin of error of the difference."""


@dataclass(frozen=True)
class Spread:
    """The standard error of a difference of log means, with its degrees of freedom (infinite if it was assumed).

    is_single: one run is compared with several.
    """

    standard_error: float
    degrees: float
    is_single: bool = False

    def tail(self, difference: float) -> float:
        """Return the one-sided p-value of a difference."""
        ratio = difference / self.standard_error
        tail = float(ndtr(-ratio) if math.isinf(self.degrees) else stdtr(self.degrees, -ratio))
        return max(tail, 1 / (1 + ratio * ratio)) if self.is_single and ratio > 0 else tail

    def reach(self, confidence: float) -> float:
        """Return the one-sided margin of error of the difference."""
        is_normal = math.isinf(self.degrees)
        return float(ndtri(confidence) if is_normal else stdtrit(self.degrees, confidence)) * self.standard_error


@dataclass(frozen=True)
class Comparison:
    """The change from a baseline to a result.

    change: relative, positive = larger. lower, upper: one-sided bounds of it at the requested confidence.
    p_larger, p_smaller: one-sided p-values.
    """

    baseline: float
    value: float
    change: float
    lower: float
    upper: float
    p_larger: float
    p_smaller: float
    spreads: tuple[Reach, ...]

    def detectable(self, false_alarm_rate: float, margin: float = 0.0) -> float:
        """Return the growth of the value that is detected with a power of 80 %.

        margin: growth below which nothing is reported.
        """
        needed = [max(_needed(spread, false_alarm_rate), math.log1p(margin)) for spread in self.spreads]
        reach = [spread.reach(_POWER) for spread in self.spreads]
        return max(growth(least + more) for least, more in zip(needed, reach, strict=True))


@dataclass(frozen=True)
class Incomparable:
    """Why two groups cannot be compared."""

    reason: str


def compare_groups(
    baseline: Sequence[float],
    values: Sequence[float],
    confidence: float = 0.95,
    *,
    assumed_noise: float | None = None,
    noise_floor: float = 0.0,
) -> Comparison | Incomparable:
    """Compare positive values, one per run.

    assumed_noise: relative standard deviation between runs, used only if each side has one run.
    noise_floor: lower limit of the noise, for metrics that are often identical to the last digit (memory, losses).
    With 0, identical values mean copied or rounded numbers, and are incomparable.
    """
    if not baseline or not values:
        return Incomparable("a side has no run")
    if not all(math.isfinite(x) and x > 0 for x in (*baseline, *values)):
        return Incomparable("a value is not a positive number")
    old, new = np.log(np.asarray(baseline, dtype=float)), np.log(np.asarray(values, dtype=float))
    spreads = _spreads(old, new, assumed_noise, noise_floor)
    if isinstance(spreads, Incomparable):
        return spreads
    difference = float(new.mean() - old.mean())
    reach = max(spread.reach(confidence) for spread in spreads)
    return Comparison(
        baseline=math.exp(old.mean()),
        value=math.exp(new.mean()),
        change=growth(difference),
        lower=growth(difference - reach),
        upper=growth(difference + reach),
        p_larger=max(spread.tail(difference) for spread in spreads),
        p_smaller=max(spread.tail(-difference) for spread in spreads),
        spreads=spreads,
    )


def _spreads(
    old: np.ndarray, new: np.ndarray, assumed_noise: float | None, noise_floor: float
) -> tuple[Spread, ...] | Incomparable:
    groups = [group for group in (old, new) if len(group) > 1]
    both = 1 / len(old) + 1 / len(new)
    if not groups:
        if assumed_noise is None:
            return Incomparable("there is one run on each side, and no estimate of the noise between runs")
        return (Spread(assumed_noise * math.sqrt(both), math.inf),)
    if not noise_floor and any(float(np.ptp(group)) == 0 for group in groups):
        return Incomparable("runs have the same value to the last digit, as copied or rounded numbers have")
    if len(groups) == 1 and (noise_floor or len(groups[0]) < _FEWEST_TO_PREDICT):
        needed = "several" if noise_floor else f"{_FEWEST_TO_PREDICT} others"
        return Incomparable(f"there is one run against {len(groups[0])}; a single one needs {needed}")
    degrees = sum(len(group) - 1 for group in groups)
    least = max(noise_floor, _FLOOR_OF_FEW if min(len(old), len(new)) < _FEW else 0.0) ** 2
    pooled = sum(float(group.var(ddof=1)) * (len(group) - 1) for group in groups) / degrees
    students = Spread(math.sqrt(max(pooled, least) * both), degrees, is_single=len(groups) == 1)
    return (students,) if len(groups) == 1 or pooled == 0 else (students, _welchs(groups))


def _welchs(groups: Sequence[np.ndarray]) -> Spread:
    parts = [float(group.var(ddof=1)) / len(group) for group in groups]
    weights = sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    return Spread(math.sqrt(sum(parts)), sum(parts) ** 2 / weights)


def _needed(spread: Reach, false_alarm_rate: float) -> float:
    """Return the smallest significant difference."""
    reach = spread.reach(1 - false_alarm_rate)
    if not (isinstance(spread, Spread) and spread.is_single):
        return reach
    return max(reach, spread.standard_error * math.sqrt(1 / false_alarm_rate - 1))


def growth(difference: float) -> float:
    """Return the relative change of a difference of logarithms."""
    return math.expm1(max(-700.0, min(difference, 700.0)))


def adjust(p_values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return adjusted p-values: all at or below the limit are jointly significant. Weights are positive shares."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i] / weights[i])
    remaining, highest = sum(weights), 0.0
    adjusted = [1.0] * len(p_values)
    for i in order:
        highest = max(highest, min(1.0, p_values[i] * max(remaining / weights[i], 1.0)))
        adjusted[i] = highest
        remaining -= weights[i]
    return adjusted
