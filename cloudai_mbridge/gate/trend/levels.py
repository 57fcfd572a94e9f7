"""Levels of a series: change points, drift, departure of the last runs. Numbers only.

ruptures proposes change points, by least squares on logarithms with clipped spikes. A proposal is kept if its levels
differ by more than `min_effect`, and by more standard errors than a threshold that covers all places. The threshold was
calibrated by simulation (tests/benchmarks/history.py): normal, heavy-tailed, skewed and autocorrelated noise. The noise
is the spread of the runs around their own levels, so a step does not hide itself.

Sources: Killick et al. 2012 (https://doi.org/10.1080/01621459.2012.737745) for the penalised search; Hansen 2000
(https://doi.org/10.1111/1468-0262.00124) for the range of places.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from cloudai_mbridge.gate.trend.level_fit import (
    MIN_LEVEL_RUNS,
    NOISE_FLOOR,
    OUTLIER,
    Departure,
    Floats,
    LevelDrift,
    LevelFit,
    despiked,
    find_departure,
    find_drift,
    fit_levels,
    spread_of,
)

MIN_EFFECT = 0.01
MIN_RUNS = 8  # fewer cannot show two levels of at least three runs
_PENALTY = 2.0  # times log(n): low, since proposals are tested
_PLACE_LIKELIHOOD = 7.35  # 95 % of Hansen's likelihood ratio
_ASSUMED_Z = 4.5


@dataclass(frozen=True)
class LevelShift:
    """A change of level.

    index: the first run of the new level. earliest, latest: where it may have been as well (95 %). change: relative,
    positive = larger; interval: of it (95 %). back_to: index of the step that left the level which is back, if one is.
    """

    index: int
    earliest: int
    latest: int
    before: float
    after: float
    change: float
    interval: tuple[float, float]
    back_to: int | None = None


@dataclass(frozen=True)
class Levels:
    """Levels of a series. unknown: reason for no result, else "". noise: relative standard deviation of a run,
    None where it was assumed.

    starts: the first run of every level; values: the levels, of one that drifts where it started. now: the last one.
    """

    unknown: str = ""
    noise: float | None = None
    starts: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    now: float | None = None
    steps: tuple[LevelShift, ...] = ()
    departure: Departure | None = None
    drift: LevelDrift | None = None


def find_levels(
    values: Sequence[float], *, min_effect: float = MIN_EFFECT, assumed_noise: float | None = None
) -> Levels:
    """Find the levels of positive values, in order.

    assumed_noise: relative standard deviation of a run, for series too short to estimate it.
    """
    if any(not (math.isfinite(value) and value > 0) for value in values):
        return Levels(unknown="values that are not positive have no relative change")
    y = np.log(np.asarray(values, dtype=np.float64))
    if len(y) >= MIN_RUNS:
        return _measured(y, min_effect)
    if assumed_noise and len(y) > 1:
        return replace(_levels(_fit_assumed(y, assumed_noise, min_effect), y, min_effect), noise=None)
    return Levels(unknown=f"{len(y)} runs are too few to tell a change from noise; {MIN_RUNS} are needed")


def threshold(num_runs: int) -> float:
    """Return the detection threshold for a step among `num_runs` runs, in standard errors."""
    return 4.7 + 0.23 * math.log2(max(num_runs, 20) / 20)


def _measured(y: Floats, min_effect: float) -> Levels:
    noise = max(spread_of(np.diff(y)) / math.sqrt(2), NOISE_FLOOR)
    fit = _place(_pruned(_propose(y, noise), y, noise, min_effect), y, noise)
    drift = _drift_at_the_end(fit, y, noise, min_effect)
    if drift is not None:
        y = y - drift.per_run * np.maximum(np.arange(len(y)) - drift.start, 0)
        fit = fit_levels((*(edge for edge in fit.edges if edge <= drift.start), len(y)), y, noise)
    return _levels(fit, y, min_effect, drift)


def _drift_at_the_end(fit: LevelFit, y: Floats, noise: float, min_effect: float) -> LevelDrift | None:
    """Return the drift that starts at the earliest level from which it explains the runs better than steps."""
    for i, start in enumerate(fit.edges[:-1]):
        edges = tuple(edge - start for edge in fit.edges[i:])
        per_run = find_drift(y[start:], noise, min_effect, fit_levels(edges, y[start:], noise))
        if per_run is not None:
            return LevelDrift(start, per_run)
    return None


def _levels(fit: LevelFit, y: Floats, min_effect: float, drift: LevelDrift | None = None) -> Levels:
    """Convert a fit of values without drift to levels of runs."""
    start = fit.edges[-2]
    departure = find_departure(fit.residuals(y)[start:], min_effect)
    if departure is not None:
        value = float(fit.centers[-1]) + math.log1p(departure.change)
        back_to = _near_level(fit, value, len(y) - start - departure.index, min_effect)
        departure = Departure(departure.index + start, departure.change, back_to)
    values = tuple(math.exp(center) for center in fit.centers.tolist())
    drifted = 1.0 if drift is None else math.exp(drift.per_run * (len(y) - 1 - start))
    return Levels(
        noise=fit.noise,
        starts=fit.edges[:-1],
        values=values,
        now=values[-1] * drifted,
        steps=tuple(_shift(fit, y, i, min_effect) for i in range(len(values) - 1)),
        departure=departure,
        drift=drift,
    )


def _propose(y: Floats, noise: float) -> tuple[int, ...]:
    """Return the edges that minimise squared distances to the levels, plus a penalty for each edge."""
    from ruptures import KernelCPD  # not at the top: it imports all of scipy.stats, which takes most of a second

    search = KernelCPD(kernel="linear", min_size=MIN_LEVEL_RUNS).fit((despiked(y, noise) / noise)[:, None])
    return (0, *map(int, search.predict(pen=_PENALTY * math.log(len(y)))))


def _pruned(edges: tuple[int, ...], y: Floats, noise: float, min_effect: float) -> LevelFit:
    """Remove the weakest edge until all remaining edges are significant and large enough."""
    fit, limit = fit_levels(edges, y, noise), threshold(len(y))
    while len(fit.strengths):
        effects = np.abs(np.expm1(np.diff(fit.centers)))
        bad = np.flatnonzero((fit.strengths < limit) | (effects < min_effect))
        if not len(bad):
            break
        weakest = int(bad[np.argmin(fit.strengths[bad])])
        fit = fit_levels(fit.edges[: weakest + 1] + fit.edges[weakest + 2 :], y, noise)
    return fit


def _place(fit: LevelFit, y: Floats, noise: float) -> LevelFit:
    """Move every edge to the best place between its neighbours."""
    edges = list(fit.edges)
    for i in range(len(edges) - 2):
        costs = _place_costs(fit, y, i)
        first = fit.edges[i]
        low, high = max(edges[i], first) + MIN_LEVEL_RUNS, edges[i + 2] - MIN_LEVEL_RUNS
        if low <= high:
            edges[i + 1] = low + int(np.argmin(costs[low - first : high - first + 1]))
    return fit if tuple(edges) == fit.edges else fit_levels(tuple(edges), y, noise)


def _place_costs(fit: LevelFit, y: Floats, i: int) -> Floats:
    """Return the cost of an edge between levels i and i + 1 at every place from the start of one to the other's end."""
    part = y[fit.edges[i] : fit.edges[i + 2]]
    before, after = (np.minimum(((part - c) / fit.noise) ** 2, OUTLIER**2) for c in fit.centers[i : i + 2])
    left = np.concatenate(([0.0], np.cumsum(before)))
    right = np.concatenate((np.cumsum(after[::-1])[::-1], [0.0]))
    return left + right


def _shift(fit: LevelFit, y: Floats, i: int, min_effect: float) -> LevelShift:
    index, first = fit.edges[i + 1], fit.edges[i]
    costs = _place_costs(fit, y, i) / fit.inflation**2
    likely = np.flatnonzero(costs <= costs[index - first] + _PLACE_LIKELIHOOD)
    likely = likely[(likely > 0) & (likely < len(costs) - 1)]
    before, after = (float(center) for center in fit.centers[i : i + 2])
    margin, change = 2 * fit.error(i), after - before
    earlier = replace(fit, edges=fit.edges[: i + 2], centers=fit.centers[: i + 1])
    return LevelShift(
        index=index,
        earliest=min(first + int(likely[0]), index) if len(likely) else index,
        latest=max(first + int(likely[-1]), index) if len(likely) else index,
        before=math.exp(before),
        after=math.exp(after),
        change=math.expm1(change),
        interval=(math.expm1(change - margin), math.expm1(change + margin)),
        back_to=_near_level(earlier, after, fit.edges[i + 2] - index, min_effect),
    )


def _near_level(fit: LevelFit, value: float, num_runs: int, min_effect: float) -> int | None:
    """Return the first run after the latest earlier level that matches a mean of `num_runs` runs, None without one."""
    left_by = abs(math.expm1(value - fit.centers[-1]))
    for j in range(len(fit.centers) - 2, -1, -1):
        length = fit.edges[j + 1] - fit.edges[j]
        error = fit.noise * fit.inflation * math.sqrt(1 / num_runs + 1 / length)
        if abs(math.expm1(value - fit.centers[j])) <= min(min_effect + 3 * error, left_by / 2):
            return fit.edges[j + 1]
    return None


def _fit_assumed(y: Floats, noise: float, min_effect: float) -> LevelFit:
    """Fit levels, of single runs if need be, under a known noise."""
    edges = [0]
    for i in range(1, len(y)):
        level = y[edges[-1] : i]
        distance = abs(y[i] - level.mean())
        if distance > _ASSUMED_Z * noise * math.sqrt(1 + 1 / len(level)) and math.expm1(distance) >= min_effect:
            edges.append(i)
    edges.append(len(y))
    centers = np.array([y[a:b].mean() for a, b in pairwise(edges)])
    return LevelFit(tuple(edges), centers, noise, 1.0, np.zeros(len(centers) - 1))
