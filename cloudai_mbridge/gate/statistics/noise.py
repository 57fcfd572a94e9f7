"""Noise between the runs of a point, estimated from its own runs and from all other points.

Ten runs estimate the variance of their point badly. The variances of forty points show how much points differ in noise
at all: each variance is modelled as drawn around a common variance, s0², with d0 degrees of freedom, and shrinks
towards it by the weight of d0 against its own degrees. s0² and d0 are unknown, so p-values are averaged over their
posterior. A point may also be noisier than all others, with a small probability; then only its own runs are used.

A t-test errs for skewed noise if one side has fewer runs than the other. So a change must also be unlikely if runs are
gamma-distributed with the skewness of all points.

Sources: Smyth, Statistical Applications in Genetics and Molecular Biology 3 (2004), the moderated t-test; Phipson et
al., Annals of Applied Statistics 10 (2016), robust against outlying variances. docs/benchmarks.md has error rates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, expit, gammaln, stdtr
from scipy.stats import kstat

_PRIOR_DEGREES = (3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 1e6)
_EQUAL_NOISE = 4.0  # prior odds of equal noise against any other d0
_PRIOR_FACTORS = (0.8, 0.9, 1.0, 1.11, 1.25)  # how far s0² may be from its estimate
_OUTLYING = 0.005  # share of points whose variance is unrelated to the others'
_OUTLYING_DEGREES = 1.0
_WINSORIZED = 2.5  # robust standard deviations
_MAD_TO_SD = 1.4826
_NO_SKEWNESS, _MOST_SKEWED = 0.05, 2.0  # an exponential distribution has 2
_STEPS_PER_SD, _REACH = 64, 32  # of the grid of a density


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
class SharedNoise:
    """Common distribution of variances. weights: of the pairs (d0, s0²) in `degrees` and `variances`."""

    weights: np.ndarray
    degrees: np.ndarray
    variances: np.ndarray

    @cached_property
    def typical(self) -> float:
        """The standard deviation between the runs of a typical point."""
        return float(np.sqrt(self.weights @ self.variances))

    def spread(
        self, variance: float, degrees: float, factor: float, extra: float = 0.0, least: float = 0.0
    ) -> SharedSpread:
        """Return the spread of a difference: its variance is a run's variance times `factor`, plus `extra`.

        variance, degrees: of the point's own runs. least: lower limit of a run's standard deviation.
        """
        s2 = np.array([variance])
        usual, outlying = (
            np.log(share) + _log_density(s2, np.array([degrees]), d0, self.variances[:, None])[:, 0]
            for share, d0 in ((1 - _OUTLYING, self.degrees[:, None]), (_OUTLYING, _OUTLYING_DEGREES))
        )
        is_outlying = expit(outlying - usual)
        moderated = (self.degrees * self.variances + degrees * variance) / (self.degrees + degrees)
        return SharedSpread(
            weights=np.append(self.weights * (1 - is_outlying), self.weights @ is_outlying),
            errors=np.sqrt(np.maximum(np.append(moderated, variance), least**2) * factor + extra),
            degrees=np.append(self.degrees + degrees, degrees),
        )


def shared_noise(variances: np.ndarray, degrees: np.ndarray) -> SharedNoise:
    """Estimate the shared noise from the variances of many points. All must be positive."""
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
    return SharedNoise(weights / weights.sum(), d0, s0)


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
