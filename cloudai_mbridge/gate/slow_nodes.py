"""Detection of slow nodes, and estimation of their effects; and the nights of runs.

A run trains as fast as its slowest node, so its time is the time of its cell (the runs that should take equally long:
one point, one side of a gate) plus the largest effect among its nodes. Most nodes have no effect. Slow nodes are found
by forward selection: the node whose runs are the most above their cells, then the next after removing the first effect.
Then nodes whose removal does not significantly worsen the fit are eliminated, at a family-wise rate over all nodes. A
node without a cell that has runs both with and without it gives no evidence: the cell itself might be slow. Nodes that
only ran together are treated as one node.

For noise of any shape, a permutation p-value tells how likely several slow runs of one node are. One run may be far
above the others: with a heavy tail, that is little evidence. A slow node's runs are all above. So
the second slowest run is tested, or the third and so on. The probability that a node has as many of the slowest runs
follows from counting, for any noise. Their distance above all others adds evidence, but no more than for noise with the
tails of Student's t with 3 degrees of freedom, or of the exponential distribution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np
from scipy.special import ndtri, stdtrit

_BETWEEN_NIGHTS = timedelta(hours=6)
TOGETHER = ","  # separates the names of nodes that were only in the same runs
SLOW = 0.01  # as a logarithm: less than this is not worth a name
_RATE = 0.001  # false-alarm rate over all nodes
_MAD_TO_SD = 1.4826
_MOST_ROUNDS = 200
_MAYBE = 2.5  # standard errors: threshold for trying a node, so that it does not hide others
_EXPLAINS = 0.7  # share of a run's excess over its cell that a node's effect must reach to explain it
_TAIL = 3  # power
_UNDERRATED = 0.01
_LIKELY = 10  # multiple of the rate at which a node is called slow


@dataclass(frozen=True)
class NodeEffect:
    """effect: extra time of a run on it, as a logarithm; error: its standard error; runs: their number."""

    effect: float
    error: float
    runs: int

    @property
    def growth(self) -> float:
        """The effect as a relative change."""
        return math.expm1(self.effect)

    def interval(self) -> tuple[float, float]:
        """Return the bounds of the relative change, at 95 %."""
        reach = 1.96 * self.error
        return math.expm1(self.effect - reach), math.expm1(self.effect + reach)


@dataclass(frozen=True, eq=False)
class NodeEffects:
    """slow: the nodes that were found slow. of_runs: per run the effect of its slowest node, 0 on normal ones.

    others: what the runs of every other node say of it, without those that a slow node explains; without the nodes of
    which nothing can be said. hidden: those of them all of whose runs slow ones explain. noise: standard deviation of a
    run, in units of the given ones. squares: the sum of the squares of the residuals in these units. columns: per slow
    node, which runs it slows; covariance: of the effects, in their order.
    """

    slow: Mapping[str, NodeEffect]
    others: Mapping[str, NodeEffect]
    of_runs: np.ndarray
    noise: float
    squares: float
    columns: np.ndarray
    covariance: np.ndarray
    hidden: frozenset[str] = frozenset()

    def variance(self, weights: np.ndarray) -> float:
        """Return the variance that the uncertainty of the effects adds to a weighted sum of runs."""
        share = self.columns @ weights
        return float(share @ self.covariance @ share) if len(share) else 0.0


def find_slow_nodes(
    values: np.ndarray,
    cells: np.ndarray,
    nodes: Sequence[Sequence[str]],
    sds: np.ndarray,
    rate: float = _RATE,
    taken: int = 0,
) -> NodeEffects:
    """Find the slow nodes among the runs.

    values: logarithms of times. cells: of each run, a number from 0. nodes: of each run. sds: of each run, the relative
    noise of its point, as weights; the common scale is estimated here. rate: false-alarm rate over all nodes.
    taken: degrees of freedom already used to compute the values.
    """
    problem = _Problem(values, cells, sds, taken)
    runs_of = _runs_of(nodes)
    names = [name for name, runs in runs_of.items() if 0 < len(runs) < len(values)]
    slow: list[str] = []
    fitted = problem.fit(slow, runs_of)
    degrees = len(values) - int(cells.max()) - 1 - taken
    if degrees < 1 or not names:
        return fitted
    matrix = np.zeros((len(names), len(values)))
    for i, name in enumerate(names):
        matrix[i, runs_of[name]] = 1.0
    tried: set[str] = set()
    compared = problem.candidates(matrix, fitted)[1] > 0
    for _ in range(min(_MOST_ROUNDS, len(names)) if rate > 0 else 0):
        effects, errors = problem.candidates(matrix, fitted)
        ratios = np.where((effects > SLOW) & (errors > 0), effects / np.where(errors > 0, errors, 1.0), 0.0)
        ratios[[names.index(name) for name in tried]] = 0.0
        best = int(ratios.argmax())
        if ratios[best] < _MAYBE:
            break
        slow.append(names[best])
        tried.add(names[best])
        fitted = problem.fit(slow, runs_of)
    while slow:
        without = {
            name: problem.fit([other for other in slow if other != name], runs_of)
            for name in _least_needed(slow, fitted, runs_of)
        }
        least = min(without, key=lambda name: without[name].squares)
        left = max(degrees - len(slow), 1)
        variance, rise = fitted.squares / left, max(without[least].squares - fitted.squares, 0.0)
        ratio = math.sqrt(rise / variance) if variance > 0 else 0.0
        if ratio >= stdtrit(left, 1 - rate / len(names)) and fitted.slow[least].effect > SLOW:
            break
        slow.remove(least)
        fitted = without[least]
    effects, errors = problem.candidates(matrix, fitted)
    others = {
        name: NodeEffect(float(effect), float(error), len(runs_of[name]))
        for name, effect, error in zip(names, effects, errors, strict=True)
        if error > 0 and name not in fitted.slow
    }
    known = {name for name, is_compared in zip(names, compared, strict=True) if is_compared}
    return replace(fitted, others=others, hidden=frozenset(known - {*others, *fitted.slow}))


def _least_needed(slow: Sequence[str], fitted: NodeEffects, runs_of: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the candidates for removal: nodes with the weakest effect, or whose runs other slow nodes explain."""
    times = np.zeros(len(fitted.of_runs), dtype=int)
    for name in slow:
        times[runs_of[name]] += 1
    shared = [name for name in slow if (times[runs_of[name]] > 1).any()]
    alone = [name for name in slow if name not in shared]
    ratios = {name: abs(each.effect) / each.error if each.error > 0 else math.inf for name, each in fitted.slow.items()}
    return [*shared, *sorted(alone, key=lambda name: ratios[name])[:1]]


def _own_runs(nodes: Sequence[Sequence[str]], found: NodeEffects, above: np.ndarray) -> dict[str, list[int]]:
    """Return the runs of each slow node that no other slow, possibly slow or hidden node explains.

    above: how far each run is above its cell.
    """
    maybe = {name: each for name, each in found.others.items() if each.effect > max(SLOW, _MAYBE * each.error)}
    effects = {one: each.effect for name, each in {**maybe, **found.slow}.items() for one in name.split(TOGETHER)}
    effects |= {one: math.inf for name in found.hidden for one in name.split(TOGETHER)}
    own = {}
    for name in found.slow:
        itself = set(name.split(TOGETHER))
        own[name] = [
            run
            for run, of_run in enumerate(nodes)
            if itself & set(of_run)
            and all(effects.get(one, 0.0) < _EXPLAINS * above[run] for one in of_run if one not in itself)
        ]
    return own


def _runs_of(nodes: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Return the runs of each node; nodes that were only in the same runs are merged under their joined names."""
    found: dict[str, list[int]] = {}
    for run, names in enumerate(nodes):
        for name in dict.fromkeys(names):
            found.setdefault(name, []).append(run)
    together: dict[tuple[int, ...], list[str]] = {}
    for name, runs in found.items():
        together.setdefault(tuple(runs), []).append(name)
    return {TOGETHER.join(names): list(runs) for runs, names in together.items()}


class _Problem:
    """Weighted least squares with a free mean for every cell."""

    def __init__(self, values: np.ndarray, cells: np.ndarray, sds: np.ndarray, taken: int) -> None:
        self._values, self._cells, self._taken = values, cells, taken
        self._weights = 1 / sds**2
        self._num_cells = int(cells.max()) + 1
        self._of_cell = np.bincount(cells, self._weights, self._num_cells)

    def _centered(self, rows: np.ndarray) -> np.ndarray:
        """Subtract the weighted means of the cells from each row."""
        sums = np.zeros((len(rows), self._num_cells))
        np.add.at(sums.T, self._cells, (rows * self._weights).T)
        return np.asarray(rows - (sums / self._of_cell)[:, self._cells])

    def _scale(self, residuals: np.ndarray) -> float:
        """Return the robust standard deviation of residuals in units of `sds`: slow nodes may be among them."""
        sizes = np.bincount(self._cells)[self._cells]
        many = sizes > 1
        units = residuals[many] * np.sqrt(self._weights[many]) / np.sqrt(1 - 1 / sizes[many])
        free = len(residuals) - self._num_cells
        factor = math.sqrt(free / (free - self._taken)) if free > self._taken else 1.0
        return factor * _MAD_TO_SD * float(np.median(np.abs(units))) if len(units) else 0.0

    def candidates(self, matrix: np.ndarray, fitted: NodeEffects) -> tuple[np.ndarray, np.ndarray]:
        """Return the effect of every node if added alone, and its standard error."""
        rows = self._centered(matrix * (fitted.of_runs < SLOW))
        residuals = self._centered((self._values - fitted.of_runs)[None, :])[0]
        scale = self._scale(residuals)
        information = (rows**2) @ self._weights
        is_known = information > 1e-9 * self._weights.max()
        safe = np.where(is_known, information, 1.0)
        effects = np.where(is_known, (rows * residuals) @ self._weights / safe, 0.0)
        return effects, np.where(is_known, scale / np.sqrt(safe), 0.0)

    def fit(self, slow: Sequence[str], runs_of: Mapping[str, Sequence[int]]) -> NodeEffects:
        """Fit the effects of these nodes jointly: a run is attributed to the slowest of its nodes."""
        effects = np.zeros(len(slow))
        columns = np.zeros((len(slow), len(self._values)))
        covariance = np.zeros((len(slow), len(slow)))
        for attempt in range(5 if slow else 0):
            previous = columns
            columns = self._columns(slow, runs_of, effects if attempt else np.zeros(len(slow)))
            if attempt and np.array_equal(previous, columns):
                break
            rows = self._centered(columns)
            normal = (rows * self._weights) @ rows.T
            inverse = np.linalg.pinv(normal, hermitian=True)
            target = self._centered(self._values[None, :])[0]
            effects = inverse @ ((rows * self._weights) @ target)
            residuals = target - effects @ rows
            degrees = len(target) - self._num_cells - self._taken - len(slow)
            covariance = inverse * float(self._weights @ residuals**2) / max(degrees, 1)
        of_runs = effects @ columns if slow else np.zeros(len(self._values))
        residuals = self._centered((self._values - of_runs)[None, :])[0]
        errors = np.sqrt(np.diag(covariance)) if slow else effects
        return NodeEffects(
            {
                name: NodeEffect(float(effect), float(error), len(runs_of[name]))
                for name, effect, error in zip(slow, effects, errors, strict=True)
            },
            {},
            of_runs,
            self._scale(residuals),
            float(self._weights @ residuals**2),
            columns,
            covariance,
        )

    def _columns(self, slow: Sequence[str], runs_of: Mapping[str, Sequence[int]], effects: np.ndarray) -> np.ndarray:
        columns = np.zeros((len(slow), len(self._values)))
        taken = np.zeros(len(self._values), dtype=bool)
        for i in sorted(range(len(slow)), key=lambda i: -effects[i]):  # stable: the first found first
            runs = np.array(runs_of[slow[i]])
            runs = runs[~taken[runs]]
            columns[i, runs] = 1.0
            taken[runs] = True
        return columns


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
    runs_of, names = _own_runs(nodes, found, residuals + found.of_runs), list(found.slow)
    chances, likely, before = dict[str, float](), set(names), None
    while likely != before:  # nodes unlikely to be slow belong to the noise, too
        before = likely
        effects = np.array([found.slow[name].effect * (name in likely) for name in names])
        of_runs = effects @ found.columns if names else np.zeros(len(values))
        residuals, spread = _residuals(values - of_runs, cells)
        noise = (residuals * spread)[spread > 0]
        above = (residuals + of_runs) / np.where(spread > 0, spread, 1.0)
        chances = {name: chance_of(above[runs_of[name]], noise) for name in likely}
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


def chance_of(values: np.ndarray, noise: np.ndarray) -> float:
    """Return the p-value of several runs of a node being this far above, 1 if it has only one run.

    values: its runs. noise: the residuals of all runs, of mean zero, at least two: those of the node's runs are part of
    it, with its own effect removed.
    """
    ordered, sd = np.sort(noise), float(np.std(noise))
    size, largest = len(ordered), float(ordered[-1])
    number, least = len(values), 1.0
    # Each rank is another test; a single run tells nothing
    for rank, value in list(enumerate(sorted(map(float, values), reverse=True), 1))[1:]:
        above = size - int(np.searchsorted(ordered, value))
        chance = math.prod((above + rank - i) / (size - i) for i in range(rank))
        if above:
            chance = min(chance, 1.0)
        else:
            fall = math.exp((largest - value) / sd) if sd > 0 else 0.0
            chance *= max((largest / value) ** _TAIL, fall) ** rank
        least = min(least, (number - 1) * math.comb(number, rank) * chance)
    return least


def night_numbers(ended: Sequence[str]) -> np.ndarray:
    """Return the night number of each run; a pause of more than six hours starts a new night. -1 if unknown."""
    moments: dict[int, datetime] = {}
    for i, text in enumerate(ended):
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            continue
        if moment.tzinfo is not None:
            moments[i] = moment
    numbers = np.full(len(ended), -1)
    order = sorted(moments, key=lambda i: moments[i])
    night = 0
    for previous, i in pairwise([order[0], *order] if order else []):
        night += moments[i] - moments[previous] > _BETWEEN_NIGHTS
        numbers[i] = night
    return numbers
