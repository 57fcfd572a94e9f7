"""Slow nodes, from many runs on different sets of nodes: a verdict on each, and facts in which nodes differ."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.history import History
from cloudai_mbridge.gate.runs import Originals, RunResult, why_not
from cloudai_mbridge.gate.slow_nodes import (
    SLOW,
    TOGETHER,
    NodeEffect,
    NodeEffects,
    find_slow_nodes,
    night_numbers,
    reach_below,
    slow_beyond_the_noise,
)
from cloudai_mbridge.metrics import PRIMARY

_MOST_NODES = 100_000
FALSE_ALARM_RATE = 0.01
SLOWDOWN = 0.03  # relative; a node shown to be slower by less is normal
_FEWEST_NIGHTS, _ROUNDS = 4, 20
_MOST_RUNS = 100_000  # of a point, in a history
_FEWEST_DEGREES = 4  # of runs beyond one per point, to estimate the noise
_FAR = 3.5  # standard deviations: a run so far below is an outlier, no evidence for its nodes' usual speed


@dataclass(frozen=True)
class OddFact:
    """A fact in which a node differs from most others. usual: value of `others` of the nodes with this fact."""

    node: str
    fact: str
    value: str
    usual: str
    others: int


def odd_facts(results: Iterable[RunResult]) -> list[OddFact]:
    """Return the facts in which nodes differ from more than half of all nodes; of two nodes, neither is an outlier."""
    told: dict[str, dict[str, str]] = {}
    for run in results:
        for node, facts in _facts_of(run.hosts).items():
            if node in told or len(told) < _MOST_NODES:
                told.setdefault(node, {}).update(facts)
    found = []
    for fact in sorted({name for facts in told.values() for name in facts}):
        values = {node: facts[fact] for node, facts in told.items() if fact in facts}
        usual, count = Counter(values.values()).most_common(1)[0]
        if count > len(values) / 2:
            found += [
                OddFact(node, fact, value, usual, count) for node, value in sorted(values.items()) if value != usual
            ]
    return found


def _facts_of(hosts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the facts of each node of a run. They come from a log; entries of another form are skipped."""
    names, facts, odd = hosts.get("names"), hosts.get("facts"), hosts.get("odd")
    if not isinstance(names, list) or not isinstance(facts, dict):
        return {}
    differing = odd if isinstance(odd, dict) else {}
    found = {}
    for name in names:
        if isinstance(name, str) and name:
            own = differing.get(name)
            both = {**facts, **(own if isinstance(own, dict) else {})}
            found[name] = {str(fact): _text(value) for fact, value in both.items() if value is not None}
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


class NodeVerdict(StrEnum):
    """SLOW: its runs are slower than those of the same point elsewhere, two of them at least.

    TOO_FEW: its runs are too few.
    """

    SLOW = "slow"
    NORMAL = "normal"
    TOO_FEW = "too few runs"


@dataclass(frozen=True)
class NodeResult:
    """effect: relative, of the step time; interval: of 95 %. None if undetermined. runs: on this node."""

    node: str
    effect: float | None
    interval: tuple[float, float] | None
    verdict: NodeVerdict
    runs: int


@dataclass(frozen=True)
class NodesResult:
    """nodes: the slow ones first. noise: relative standard deviation between runs. notes: excluded runs.

    odd: facts in which nodes differ from most others.
    """

    nodes: tuple[NodeResult, ...]
    noise: float | None
    runs: int
    false_alarm_rate: float
    slowdown: float
    notes: tuple[str, ...] = ()
    odd: tuple[OddFact, ...] = ()

    @property
    def slow(self) -> tuple[NodeResult, ...]:
        return tuple(node for node in self.nodes if node.verdict is NodeVerdict.SLOW)


@dataclass(frozen=True)
class NodeRun:
    """A run's step time in s on its nodes. cell: runs of one cell should take equally long.

    point, night: of a run that is alone in its cell, what other runs may have in common with it.
    """

    cell: str
    nodes: tuple[str, ...]
    step_time_s: float
    point: str = ""
    night: str = ""


def runs_on_nodes(results: Iterable[RunResult]) -> tuple[list[NodeRun], list[str]]:
    """Return the good runs with known nodes, each once, and notes on the other runs.

    The runs of a point in one report are a cell: between reports software may have changed.
    """
    originals, found, unknown = Originals(), [], 0
    left_out: Counter[str] = Counter()
    for run in results:
        value = run.values.get(PRIMARY)
        if originals.of(run) is not None:
            continue
        originals.add(run)
        reason = why_not(run)
        if reason or value is None:
            left_out[(reason or "it has no step time") if run.is_success else "failed"] += 1
        elif not run.nodes:
            unknown += 1
        else:
            point = f"{run.point}\n{run.comparability_id}"
            found.append(NodeRun(f"{run.source}\n{point}", run.nodes, value[0], point, run.source))
    notes = [f"{counted(count, 'run')} left out: {reason}" for reason, count in left_out.items()]
    notes += [f"the nodes of {counted(unknown, 'run')} are unknown"] if unknown else []
    return found, notes


def runs_of_history(history: History, without: Container[str] = ()) -> list[NodeRun]:
    """Return the good runs of a history with known nodes. without: ids of runs to exclude."""
    found = [
        (key, run.ended_at, run.nodes, value)
        for key in sorted(history.keys())
        for run, _, value in history.series(key, PRIMARY, _MOST_RUNS).runs
        if value and run.nodes and run.run_id not in without
    ]
    nights = night_numbers([ended for _, ended, _, _ in found])
    return [
        NodeRun(f"{key}\n{night}", nodes, value, key, f"night {night}")
        for (key, _, nodes, value), night in zip(found, nights, strict=True)
        if night >= 0
    ]


def _across_nights(runs: Sequence[NodeRun]) -> tuple[list[NodeRun], int]:
    """Move runs that are alone in their cell to a cell of their night, after subtracting their point's median.

    Return the runs in their new cells, and how many degrees of freedom the points' medians have used. A point of few
    nights, or a night of one point, stays unchanged.
    """
    in_cell = Counter(run.cell for run in runs)
    nights_of = Counter(run.point for run in runs if run.point and in_cell[run.cell] == 1)
    chosen = [run for run in runs if in_cell[run.cell] == 1 and nights_of[run.point] >= _FEWEST_NIGHTS]
    in_night = Counter(run.night for run in chosen)
    chosen = [run for run in chosen if in_night[run.night] > 1]
    points, nights = (sorted({getattr(run, name) for run in chosen}) for name in ("point", "night"))
    of_point = np.array([points.index(run.point) for run in chosen], dtype=int)
    of_night = np.array([nights.index(run.night) for run in chosen], dtype=int)
    values = np.log([run.step_time_s for run in chosen])
    times, levels = np.zeros(len(points)), np.zeros(len(nights))
    for _ in range(_ROUNDS):  # alternating medians: robust against a slow node
        times = _medians(values - levels[of_night], of_point, len(points))
        levels = _medians(values - times[of_point], of_night, len(nights))
    own = np.exp(values - times[of_point])
    changed = {
        id(run): replace(run, cell=run.night, step_time_s=float(time)) for run, time in zip(chosen, own, strict=True)
    }
    return [changed.get(id(run), run) for run in runs], max(len(points) - 1, 0)


def _medians(values: np.ndarray, groups: np.ndarray, number: int) -> np.ndarray:
    return np.array([np.median(values[groups == group]) for group in range(number)])


def judge_nodes(
    runs: Sequence[NodeRun], *, false_alarm_rate: float = FALSE_ALARM_RATE, slowdown: float = SLOWDOWN
) -> NodesResult:
    """Judge whether each node is slow.

    false_alarm_rate: family-wise, of the verdict slow.
    """
    counts = Counter(node for run in runs for node in dict.fromkeys(run.nodes))
    runs, taken = _across_nights(runs)
    cells = {cell: number for number, cell in enumerate(dict.fromkeys(run.cell for run in runs))}
    result = NodesResult((), None, len(runs), false_alarm_rate, slowdown)
    if len(runs) - len(cells) - taken < _FEWEST_DEGREES:
        found = [NodeResult(name, None, None, NodeVerdict.TOO_FEW, count) for name, count in counts.items()]
        return replace(result, nodes=tuple(sorted(found, key=lambda node: node.node)))
    problem = (
        np.log([run.step_time_s for run in runs]),
        np.array([cells[run.cell] for run in runs]),
        [run.nodes for run in runs],
    )
    effects = find_slow_nodes(*problem, np.ones(len(runs)), false_alarm_rate, taken)
    sure = slow_beyond_the_noise(*problem, effects, len(counts), false_alarm_rate)
    reach, typical = reach_below(*problem[:2], effects), _without_far_below(*problem, effects, taken)
    found, notes = [], list[str]()
    for names, effect in {**effects.slow, **effects.others}.items():
        together = names.split(TOGETHER)
        of_most = [typical.get(name) for name in together]
        is_slow = names in sure
        is_normal = all(
            each is not None and each.effect + reach * each.error < math.log1p(slowdown) for each in (effect, *of_most)
        )
        verdict = NodeVerdict.SLOW if is_slow else NodeVerdict.NORMAL if is_normal else NodeVerdict.TOO_FEW
        if is_slow and len(together) > 1:
            verdict = NodeVerdict.TOO_FEW
            notes.append(f"one of {', '.join(together)} is slow: no run had one without the other")
        found += [NodeResult(name, effect.growth, effect.interval(), verdict, effect.runs) for name in together]
    known = {node.node for node in found}
    found += [NodeResult(name, None, None, NodeVerdict.TOO_FEW, counts[name]) for name in counts if name not in known]
    order = list(NodeVerdict)
    found.sort(key=lambda node: (order.index(node.verdict), -(node.effect or 0.0), node.node))
    return replace(result, nodes=tuple(found), noise=effects.noise, notes=tuple(notes))


def _without_far_below(
    values: np.ndarray, cells: np.ndarray, nodes: Sequence[Sequence[str]], found: NodeEffects, taken: int
) -> dict[str, NodeEffect]:
    """Return the effects of nodes that are not slow, without runs far below others: an outlier makes no node normal.

    Arguments as in `find_slow_nodes`.
    """
    above = values - found.of_runs
    above = above - (np.bincount(cells, above) / np.bincount(cells))[cells]
    kept = np.flatnonzero((above > -max(_FAR * found.noise, SLOW)) & (found.of_runs < SLOW))
    if len(kept) < 2:
        return {}
    kept_cells = np.unique(cells[kept], return_inverse=True)[1]
    of_kept = find_slow_nodes(
        values[kept], kept_cells, [nodes[run] for run in kept.tolist()], np.ones(len(kept)), 0.0, taken
    )
    return {name: effect for names, effect in of_kept.others.items() for name in names.split(TOGETHER)}
