"""How probable it is that the mean of a few runs is far above the others, whatever the shape of the noise.

The distribution is that of the residuals seen, with an exponential tail where they get few: none is seen as far out as
a false alarm must be. How heavy the tail is, is itself known from so many residuals only. The probability of a mean is
Lugannani and Rice's saddlepoint approximation.
"""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammainccinv, ndtr

from cloudai_mbridge.gate.statistics.slow_nodes import NodeEffects

_TAIL, _FEWEST = 0.25, 8  # of the residuals; half of them if these are few
# What a tail's mean excess is expected to be, in standard deviations, and as how many residuals of a tail that counts:
# it is 0.6 for normal noise, 1 for exponential
_USUAL, _COUNTS = 0.8, 16
_NEVER = 1e4  # times the mean excess above a tail's start: no number can tell how improbable
_DOUBTS = np.linspace(-4.5, 4.5, 31)  # standard normal: of the tail's weight


def slow_beyond_the_noise(
    values: np.ndarray, cells: np.ndarray, found: NodeEffects, num_nodes: int, rate: float, taken: int = 0
) -> set[str]:
    """Return the slow nodes whose runs are further above than as many runs of all nodes are by themselves.

    Where noise is skewed, a normal distribution says too little of how far above that may be. Arguments as in
    `find_slow_nodes`; num_nodes: of which each might have been called slow.
    """
    residuals = values - found.of_runs
    sizes = np.bincount(cells)
    residuals = residuals - (np.bincount(cells, residuals) / sizes)[cells]
    is_compared = sizes[cells] > 1
    noise = Noise(residuals[is_compared] * np.sqrt(sizes / np.maximum(sizes - 1, 1))[cells][is_compared])
    degrees = len(values) - int(cells.max()) - 1 - taken - len(found.slow)
    variance = found.squares / max(degrees, 1)
    return {
        name
        for name, each in found.slow.items()
        if each.error == 0 or noise.exceeds(each.effect, variance / each.error**2) <= rate / num_nodes
    }


class Noise:
    """The distribution of a run's residual."""

    def __init__(self, residuals: np.ndarray) -> None:
        """Take residuals of mean zero, at least two."""
        ordered = np.sort(residuals)
        size = max(int(_TAIL * len(ordered)), min(_FEWEST, len(ordered) // 2))
        self._start, self._body = float(ordered[-size - 1]), ordered[:-size]
        self._share = size / len(ordered)
        excess = float(np.sum(ordered[-size:] - self._start)) + _COUNTS * _USUAL * float(np.std(ordered))
        self._excesses = excess / gammainccinv(size + _COUNTS, ndtr(_DOUBTS))
        weights = np.exp(-(_DOUBTS**2) / 2)
        self._weights = weights / weights.sum()

    def exceeds(self, mean: float, runs: float) -> float:
        """Return the probability that the mean of `runs` residuals is at least `mean`; `runs` may be a fraction."""
        return float(self._weights @ [self._exceeds(mean, runs, float(excess)) for excess in self._excesses])

    def _exceeds(self, mean: float, runs: float, excess: float) -> float:
        if mean - self._start > _NEVER * excess:
            return 0.0
        if mean <= self._cumulants(0.0, excess)[1]:
            return 1.0
        s = brentq(lambda s: self._cumulants(s, excess)[1] - mean, 0.0, (1 - 1e-9) / excess)
        cumulant, _, curvature = self._cumulants(s, excess)
        w = math.sqrt(max(2 * runs * (s * mean - cumulant), 0.0))
        v = s * math.sqrt(runs * curvature)
        if w < 1e-3:
            return 0.5
        density = math.exp(-w * w / 2) / math.sqrt(2 * math.pi)
        return float(min(1.0, max(0.0, ndtr(-w) + density * (1 / v - 1 / w))))

    def _cumulants(self, s: float, excess: float) -> tuple[float, float, float]:
        """Return the cumulant generating function at s, and its first two derivatives."""
        top, rate = self._start, 1 - excess * s
        body = np.exp(s * (self._body - top)) / len(self._body) * (1 - self._share)
        tail, scale = self._share / rate, excess / rate
        total = body.sum() + tail
        first = (self._body @ body + tail * (top + scale)) / total
        second = (self._body**2 @ body + tail * (top**2 + 2 * top * scale + 2 * scale**2)) / total
        return s * top + math.log(total), first, second - first**2
