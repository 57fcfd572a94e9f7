"""The memory model of layouts: predictions share an error, and each has a small error of its own."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from cloudai_mbridge.tune.factors import Floats
from cloudai_mbridge.tune.ranking import MEMORY_SD

_OWN_SD = 0.02
_STEPS = 401
_POINTS = 2001  # a fiftieth of a layout's own error apart


class Room:
    """The probability that each of n layouts fits. peaks: predicted, in the unit of `given`, the GPU's memory."""

    def __init__(self, peaks: Sequence[float] | Floats, given: float) -> None:
        self._excess = np.log(np.asarray(peaks, dtype=float)) - math.log(given)
        self._errors = np.linspace(-6 * MEMORY_SD, 6 * MEMORY_SD, _STEPS)
        self._logs = -np.square(self._errors / MEMORY_SD) / 2
        reach = 6 * (MEMORY_SD + _OWN_SD)
        self._points = np.linspace(-reach, reach, _POINTS)
        self._fits = ndtr(-(self._points[:, None] + self._errors) / _OWN_SD)

    def learn(self, index: int, *, fits: bool) -> None:
        """Record whether a layout has run out of memory."""
        over = (self._excess[index] + self._errors) / _OWN_SD
        self._logs = self._logs + np.log(np.maximum(ndtr(-over if fits else over), 1e-300))

    def probabilities(self) -> Floats:
        """Return the probability that each layout fits, [n]."""
        weights = np.exp(self._logs - self._logs.max())
        weights /= weights.sum()
        return np.asarray(np.interp(self._excess, self._points, self._fits @ weights))
