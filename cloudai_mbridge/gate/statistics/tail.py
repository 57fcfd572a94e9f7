"""Permutation p-value for several runs of one node being slow, for noise of any shape.

One run may be far above the others: with a heavy tail, that is little evidence. A slow node's runs are all above. So
the second slowest run is tested, or the third and so on. The probability that a node has as many of the slowest runs
follows from counting, for any noise. Their distance above all others adds evidence, but no more than for noise with the
tails of Student's t with 3 degrees of freedom, or of the exponential distribution.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from cloudai_mbridge.gate.statistics.slow_nodes import NodeEffects, own_runs

_TAIL = 3  # power
_UNDERRATED = 0.01
_LIKELY = 10  # multiple of the rate at which a node is called slow


def slow_beyond_the_noise(
    values: np.ndarray,
    cells: np.ndarray,
    nodes: Sequence[Sequence[str]],
    found: NodeEffects,
    num_nodes: int,
    rate: float,
) -> set[str]:
    """Return the slow nodes with at least two runs further above their cells than noise explains.

    Arguments as in `find_slow_nodes`; num_nodes: number of candidate nodes.
    """
    residuals, _ = _residuals(values - found.of_runs, cells)
    runs_of, names = own_runs(nodes, found, residuals + found.of_runs), list(found.slow)
    chances, likely, before = dict[str, float](), set(names), None
    while likely != before:  # nodes unlikely to be slow belong to the noise, too
        before = likely
        effects = np.array([found.slow[name].effect * (name in likely) for name in names])
        of_runs = effects @ found.columns if names else np.zeros(len(values))
        residuals, spread = _residuals(values - of_runs, cells)
        noise = Noise((residuals * spread)[spread > 0])
        above = (residuals + of_runs) / np.where(spread > 0, spread, 1.0)
        chances = {name: noise.exceeds(above[runs_of[name]]) for name in likely}
        likely = {name for name in likely if chances[name] <= _LIKELY * rate / num_nodes}
    return {name for name, chance in chances.items() if chance <= rate / num_nodes}


def reach_below(values: np.ndarray, cells: np.ndarray, found: NodeEffects) -> float:
    """Return the 99 % bound on the underestimation of an effect, in standard errors."""
    residuals, spread = _residuals(values - found.of_runs, cells)
    lowest = -float(np.quantile((residuals * spread)[spread > 0], _UNDERRATED))
    return max(-float(ndtri(_UNDERRATED)), lowest / found.noise if found.noise > 0 else 0.0)


def _residuals(values: np.ndarray, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each value's residual from its cell's mean, and its correction for the cell's size; 0 if alone."""
    sizes = np.bincount(cells)
    residuals = values - (np.bincount(cells, values) / sizes)[cells]
    return residuals, np.where(sizes > 1, np.sqrt(sizes / np.maximum(sizes - 1, 1)), 0.0)[cells]


class Noise:
    """The distribution of a run's residual."""

    def __init__(self, residuals: np.ndarray) -> None:
        """Take residuals of mean zero, at least two."""
        self._ordered, self._sd = np.sort(residuals), float(np.std(residuals))

    def exceeds(self, values: np.ndarray) -> float:
        """Return the p-value of several runs of a node being this far above, 1 if it has only one run.

        values: its runs, whose residuals are part of the noise, with its own effect removed.
        """
        number, least = len(values), 1.0
        for rank, value in enumerate(sorted(values, reverse=True), 1):
            if rank > 1:  # each rank is another test
                least = min(least, (number - 1) * math.comb(number, rank) * self._as_many(float(value), rank))
        return least

    def _as_many(self, value: float, number: int) -> float:
        size, largest = len(self._ordered), float(self._ordered[-1])
        above = size - int(np.searchsorted(self._ordered, value))
        slowest = math.prod((above + number - i) / (size - i) for i in range(number))
        if above:
            return min(slowest, 1.0)
        fall = math.exp((largest - value) / self._sd) if self._sd > 0 else 0.0
        return slowest * max((largest / value) ** _TAIL, fall) ** number
