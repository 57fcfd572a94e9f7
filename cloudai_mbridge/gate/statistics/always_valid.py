"""Whether a series of nights drifts, with a false-alarm rate that holds however often it is looked at.

After every night there is an evidence: how much likelier the nights are with a drift from some night on than without,
averaged over all drifts that could be. Where nothing drifts, the probability that it ever reaches 1/rate is at most
`rate`. The level and the noise of nights are not known, and cancel out.

Sources: Ville's inequality; Lai, Annals of Statistics 4 (1976), tests for an unknown variance; the mixture is over a
normal slope in units of the noise, cut at 0, and over its beginning.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

_SLOPES = (0.04, 0.15)  # a night, in units of the noise of a night
_BETWEEN_BEGINNINGS = 7
_FROM_THE_FIRST = 0.5  # the weight of a drift that begins with the first night; the others share the rest
_FEWEST_NIGHTS = 5


@dataclass(frozen=True)
class Drift:
    """evidence: for a growth of the values. slope: relative, a night; since: the number of the night it began at.

    change: of the whole since then, relative.
    """

    evidence: float
    slope: float
    since: int
    change: float


def find_drift(nights: Sequence[float], horizon: int) -> Drift | None:
    """Return the evidence that a series of logarithms, one a night, grows from some night on.

    horizon: the number of nights over which the rate holds, which says from where a drift may begin. None: too few.
    """
    values = np.asarray(nights, dtype=float)[:horizon]
    if len(values) < _FEWEST_NIGHTS:
        return None
    beginnings = range(0, horizon, _BETWEEN_BEGINNINGS)
    found = [_of_beginning(values, start) for start in beginnings]
    later = [each for each, _ in found[1:]]
    evidence = found[0][0]
    if later:
        evidence = _FROM_THE_FIRST * evidence + (1 - _FROM_THE_FIRST) * sum(later) / len(later)
    start = max(range(len(found)), key=lambda i: found[i][0])
    slope, since = found[start][1], beginnings[start]
    return Drift(evidence, math.expm1(slope), since, math.expm1(slope * (len(values) - 1 - since)))


def _of_beginning(values: np.ndarray, start: int) -> tuple[float, float]:
    """Return the evidence for a drift that begins at a night, and its slope; 1 before it could have begun."""
    n = len(values)
    x = np.maximum(0.0, np.arange(n) - start)
    x -= x.mean()
    square = float(x @ x)
    total = float(((values - values.mean()) ** 2).sum())
    if square == 0 or total == 0:
        return 1.0, 0.0
    slope = float(x @ values) / square
    evidence = 0.0
    for prior in _SLOPES:
        share = prior**2 * square / (1 + prior**2 * square)
        rest = total - slope**2 * square * share
        ratio = -0.5 * math.log1p(prior**2 * square) + 0.5 * (n - 1) * math.log(total / rest)
        scale = math.sqrt(prior**2 / (1 + prior**2 * square) * rest / (n - 1))
        evidence += 2 * math.exp(min(ratio, 700.0)) * float(stdtr(n - 1, slope * share / scale))
    return evidence / len(_SLOPES), slope
