"""Statistics of a gate: comparisons of two groups of runs, and the noise of many points.

Values are compared as logarithms, so that changes are relative and the noise of a faster run is the same share of it.
Each run is one value: steps within a run are correlated, and even a thousand steps do not show the noise between runs.
With two runs or more on both sides, a change has to pass two t-tests: Welch's, which errs for few runs against many
with normal noise, and Student's, which errs for few runs against many with skewed noise; each is safe if the other is
not. A single run is compared with the prediction for one more run from five runs or more of the other side. It might be
an outlier, for example on a slow node, so it must be unlikely under any distribution of that spread (Cantelli's
inequality).

Ten runs estimate the variance of their point badly. The variances of forty points show how much points differ in noise
at all: each variance is modelled as drawn around a common variance, s0², with d0 degrees of freedom, and shrinks
towards it by the weight of d0 against its own degrees. s0² and d0 are unknown, so p-values are averaged over their
posterior. A point may also be noisier than all others, with a small probability; then only its own runs are used.

A t-test errs for skewed noise if one side has fewer runs than the other. So a change must also be unlikely if runs are
gamma-distributed with the skewness of all points.

Sources: Welch, Biometrika 34 (1947); Hahn and Meeker, Statistical Intervals (1991), prediction of one observation;
Cantelli's one-sided form of Chebyshev's inequality; Smyth, Statistical Applications in Genetics and Molecular Biology 3
(2004), the moderated t-test; Phipson et al., Annals of Applied Statistics 10 (2016), robust against outlying variances.
tests/benchmarks/gate_curves.py measures the error rates, docs/benchmarks.md has them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, expit, gammaln, ndtr, ndtri, stdtr, stdtrit
from scipy.stats import kstat

_POWER = 0.8
_FEWEST_TO_PREDICT = 5
# Two runs hardly determine their spread, and five may all have missed the slow node of a single run
FEW_RUNS, NOISE_OF_FEW = 3, 0.01
_PRIOR_DEGREES = (3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 1e6)
_EQUAL_NOISE = 4.0  # prior odds of equal noise against any other d0
_PRIOR_FACTORS = (0.8, 0.9, 1.0, 1.11, 1.25)  # how far s0² may be from its estimate
_OUTLYING = 0.005  # share of points whose variance is unrelated to the others'
_OUTLYING_DEGREES = 1.0
_WINSORIZED = 2.5  # robust standard deviations
_MAD_TO_SD = 1.4826
_NO_SKEWNESS, _MOST_SKEWED = 0.05, 2.0  # an exponential distribution has 2
_STEPS_PER_SD, _REACH = 64, 32  # of the grid of a density


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


@dataclass(frozen=True, eq=False)
class SharedSpread:
    """The standard error of a difference of log means, whose variance was moderated: a mixture of t-distributions."""

    weights: np.ndarray
    errors: np.ndarray
    degrees: np.ndarray

    def tail(self, difference: float) -> float:
        """Return the one-sided p-value of a difference."""
        return float(self.weights @ stdtr(self.degrees, -difference / self.errors))

    def reach(self, confidence: float) -> float:
        """Return the one-sided margin of error of the difference."""
        return _solve(self.tail, 1 - confidence, float(self.errors.max()))


@dataclass(frozen=True)
class SkewedSpread:
    """The difference of two means of runs whose noise is skewed. scale: the standard deviation of a run."""

    scale: float
    skewness: float
    runs: int
    others: int

    def tail(self, difference: float) -> float:
        """Return the one-sided p-value of a difference."""
        at, above = skewed_tail(self.skewness, self.runs, self.others)
        return float(np.interp(difference / self.scale, at, above))

    def reach(self, confidence: float) -> float:
        """Return the one-sided margin of error of the difference."""
        return _solve(self.tail, 1 - confidence, self.scale)

    def mirrored(self) -> "SkewedSpread":
        """Return the spread of the negated difference."""
        return SkewedSpread(self.scale, -self.skewness, self.runs, self.others)


def _solve(tail: Callable[[float], float], probability: float, step: float) -> float:
    """Find the non-negative argument at which a decreasing function has this value."""
    if probability >= tail(0.0):
        return 0.0
    low, high = 0.0, step
    while tail(high) > probability and high < 1e6 * step:
        low, high = high, 2 * high
    if tail(high) > probability:
        return high
    return float(brentq(lambda at: tail(at) - probability, low, high, xtol=1e-12 * step, rtol=1e-12))


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
    spreads: tuple[Spread | SharedSpread | SkewedSpread, ...]

    def detectable(self, false_alarm_rate: float, margin: float = 0.0) -> float:
        """Return the growth of the value that is detected with a power of 80 %.

        margin: growth below which nothing is reported.
        """
        found = []
        for spread in self.spreads:
            needed = spread.reach(1 - false_alarm_rate)
            if isinstance(spread, Spread) and spread.is_single:
                needed = max(needed, spread.standard_error * math.sqrt(1 / false_alarm_rate - 1))
            found.append(growth(max(needed, math.log1p(margin)) + spread.reach(_POWER)))
        return max(found)


def compare_groups(
    baseline: Sequence[float],
    values: Sequence[float],
    confidence: float = 0.95,
    *,
    assumed_noise: float | None = None,
    noise_floor: float = 0.0,
) -> Comparison | str:
    """Compare positive values, one per run; or return the reason why they cannot be compared.

    assumed_noise: relative standard deviation between runs, used only if each side has one run.
    noise_floor: lower limit of the noise, for metrics that are often identical to the last digit (memory, losses).
    With 0, identical values mean copied or rounded numbers, and are incomparable.
    """
    if not baseline or not values:
        return "a side has no run"
    if not all(math.isfinite(x) and x > 0 for x in (*baseline, *values)):
        return "a value is not a positive number"
    old, new = np.log(np.asarray(baseline, dtype=float)), np.log(np.asarray(values, dtype=float))
    spreads = _spreads(old, new, assumed_noise, noise_floor)
    if isinstance(spreads, str):
        return spreads
    difference = float(new.mean() - old.mean())
    reach = max(spread.reach(confidence) for spread in spreads)
    p_larger, p_smaller = (max(spread.tail(sign * difference) for spread in spreads) for sign in (1, -1))
    return comparison_of(float(old.mean()), float(new.mean()), reach, p_larger, p_smaller, spreads)


def comparison_of(
    old: float,
    new: float,
    reach: float,
    p_larger: float,
    p_smaller: float,
    spreads: tuple[Spread | SharedSpread | SkewedSpread, ...],
) -> Comparison:
    """Return the comparison of two means of logarithms. reach: the one-sided margin of error of their difference."""
    change, lower, upper = map(growth, (new - old, new - old - reach, new - old + reach))
    return Comparison(math.exp(old), math.exp(new), change, lower, upper, p_larger, p_smaller, spreads)


def _spreads(
    old: np.ndarray, new: np.ndarray, assumed_noise: float | None, noise_floor: float
) -> tuple[Spread, ...] | str:
    groups = [group for group in (old, new) if len(group) > 1]
    both = 1 / len(old) + 1 / len(new)
    if not groups:
        if assumed_noise is None:
            return "there is one run on each side, and no estimate of the noise between runs"
        return (Spread(assumed_noise * math.sqrt(both), math.inf),)
    if not noise_floor and any(float(np.ptp(group)) == 0 for group in groups):
        return "runs have the same value to the last digit, as copied or rounded numbers have"
    if len(groups) == 1 and (noise_floor or len(groups[0]) < _FEWEST_TO_PREDICT):
        needed = "several" if noise_floor else f"{_FEWEST_TO_PREDICT} others"
        return f"there is one run against {len(groups[0])}; a single one needs {needed}"
    degrees = sum(len(group) - 1 for group in groups)
    least = max(noise_floor, NOISE_OF_FEW if min(len(old), len(new)) < FEW_RUNS else 0.0) ** 2
    pooled = sum(float(group.var(ddof=1)) * (len(group) - 1) for group in groups) / degrees
    students = Spread(math.sqrt(max(pooled, least) * both), degrees, is_single=len(groups) == 1)
    if len(groups) == 1 or pooled == 0:
        return (students,)
    parts = [float(group.var(ddof=1)) / len(group) for group in groups]
    weights = sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    return (students, Spread(math.sqrt(sum(parts)), sum(parts) ** 2 / weights))  # the second is Welch's


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


def shared_spreads(
    variances: np.ndarray, degrees: np.ndarray, factors: np.ndarray, least: np.ndarray, extras: Sequence[np.ndarray]
) -> tuple[float, list[list[SharedSpread]]]:
    """Return the standard deviation between the runs of a typical point, and per `extras` the points' spreads.

    variances, degrees: of the points' own runs; the variances must be positive. The variance of a difference is a run's
    variance times `factors`, plus the extra. least: lower limits of a run's standard deviation.
    """
    weights, d0, s0 = _common_distribution(variances, degrees)

    def spread(variance: float, degree: float, factor: float, least: float, extra: float) -> SharedSpread:
        s2 = np.array([variance])
        usual, outlying = (
            np.log(share) + _log_density(s2, np.array([degree]), prior, s0[:, None])[:, 0]
            for share, prior in ((1 - _OUTLYING, d0[:, None]), (_OUTLYING, _OUTLYING_DEGREES))
        )
        is_outlying = expit(outlying - usual)
        moderated = (d0 * s0 + degree * variance) / (d0 + degree)
        return SharedSpread(
            weights=np.append(weights * (1 - is_outlying), weights @ is_outlying),
            errors=np.sqrt(np.maximum(np.append(moderated, variance), least**2) * factor + extra),
            degrees=np.append(d0 + degree, degree),
        )

    own = list(zip(variances, degrees, factors, least, strict=True))
    spreads = [[spread(*point, e) for point, e in zip(own, extra, strict=True)] for extra in extras]
    return float(np.sqrt(weights @ s0)), spreads


def _common_distribution(variances: np.ndarray, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimate the common distribution of variances: pairs (d0, s0²) with their weights, as weights, d0 and s0²."""
    logs = np.log(variances) - digamma(degrees / 2) + np.log(degrees / 2)
    middle = float(np.median(logs))
    limit = _WINSORIZED * _MAD_TO_SD * float(np.median(np.abs(logs - middle)))
    mean = float(np.clip(logs, middle - limit, middle + limit).mean())
    pairs = [
        (d0, np.exp(mean + digamma(d0 / 2) - np.log(d0 / 2)) * factor)
        for d0 in _PRIOR_DEGREES
        for factor in _PRIOR_FACTORS
    ]
    d0, s0 = np.array(pairs).T
    usual = _log_density(variances, degrees, d0[:, None], s0[:, None])
    outlying = _log_density(variances, degrees, _OUTLYING_DEGREES, s0[:, None])
    logs_of_pairs = np.logaddexp(np.log(1 - _OUTLYING) + usual, np.log(_OUTLYING) + outlying).sum(axis=1)
    weights = np.exp(logs_of_pairs - logs_of_pairs.max()) * np.where(d0 == _PRIOR_DEGREES[-1], _EQUAL_NOISE, 1.0)
    return weights / weights.sum(), d0, s0


def _log_density(variances: np.ndarray, degrees: np.ndarray, d0: "np.ndarray | float", s0: np.ndarray) -> np.ndarray:
    """Return the log density of sample variances: s0² times an F-distribution with (degrees, d0)."""
    x, half, half0 = variances / s0, degrees / 2, np.asarray(d0) / 2
    return np.asarray(
        gammaln(half + half0)
        - gammaln(half)
        - gammaln(half0)
        + half * np.log(half / half0)
        + (half - 1) * np.log(x)
        - (half + half0) * np.log1p(half * x / half0)
        - np.log(s0)
    )


def skewness(groups: Sequence[np.ndarray]) -> float:
    """Return the skewness of runs around the means of their groups, of three runs or more each, at most 2.

    The third cumulants and the variances are unbiased. 0 if it is not significant.
    """
    large = [group for group in groups if len(group) > 2]
    if not large:
        return 0.0
    third = float(np.mean([kstat(group, 3) for group in large]))
    variance = float(np.mean([group.var(ddof=1) for group in large]))
    found = third / variance**1.5 if variance > 0 else 0.0
    chance = 2 * math.sqrt(6 / sum(map(len, large)))  # for runs without skewed noise
    return round(max(-_MOST_SKEWED, min(found, _MOST_SKEWED)), 1) if abs(found) > chance else 0.0


@lru_cache(maxsize=256)
def skewed_tail(skewness: float, runs: int, others: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid, and the probability that the mean of `runs` minus the mean of `others` is at least as large.

    The runs are gamma-distributed (Pearson's type III) with standard deviation 1 and this skewness.
    """
    size, step = 2 * _STEPS_PER_SD * _REACH, 1 / _STEPS_PER_SD
    frequencies = 2 * np.pi * np.fft.rfftfreq(size, d=step)
    logs = runs * _log_characteristic(skewness, frequencies / runs)
    logs += others * np.conj(_log_characteristic(skewness, frequencies / others))
    density = np.fft.fftshift(np.fft.irfft(np.exp(np.conj(logs)), n=size))
    density = np.clip(density, 0.0, None)
    at = (np.arange(size) - size // 2) * step
    return at, np.cumsum(density[::-1])[::-1] / density.sum()


def _log_characteristic(skewness: float, t: np.ndarray) -> np.ndarray:
    if abs(skewness) < _NO_SKEWNESS:
        return -(t**2) / 2 + 0j
    root = 2 / skewness  # of the shape, with the sign of the skewness
    return -(root**2) * np.log1p(-1j * t / root) - 1j * t * root
