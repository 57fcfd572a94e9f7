"""Verdicts as sentences: numbers, confidence, and the runs needed to resolve an inconclusive verdict."""

import math
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.compare.policy import GatePolicy
from cloudai_mbridge.gate.compare.verdict import GateVerdict
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS, PRIMARY

if TYPE_CHECKING:
    from cloudai_mbridge.gate.compare.metric import Tested
    from cloudai_mbridge.gate.statistics.comparison import Comparison

_FAR = 4.0  # robust standard deviations
_MAD_TO_SD = 1.4826
_MOST_RUNS = 100
_SMALLEST_P = 1e-9
_FEWEST_FOR_A_MIDDLE = 4


def explain(
    verdict: GateVerdict, shown: "Comparison", found: "Tested", policy: GatePolicy, *, is_like_all: bool = False
) -> str:
    """Explain a metric's verdict with its numbers. is_like_all: it is as bad as the change of all points."""
    runs = f"{counted(found.num_runs, 'run')} against {found.num_baseline_runs}"
    bounds = f"{policy.confidence * 100:.4g} % bounds {percent(shown.lower)} and {percent(shown.upper)}"
    text = f"{percent(shown.change)} ({shown.baseline:.5g} to {shown.value:.5g}, {bounds}, {runs})"
    match verdict:
        case GateVerdict.REGRESSION if is_like_all:
            return f"{text}; as all points are"
        case GateVerdict.REGRESSION:
            margin = math.copysign(found.policy.margin, shown.change)
            p = found.adjusted_worse
            probability = f"p = {p:.2g}" if p >= _SMALLEST_P else f"p < {_SMALLEST_P:.0g}"
            return f"{text}; beyond the margin of {percent(margin)}, {probability}"
        case GateVerdict.PASS:
            return f"{text}; within {_limits(found)}"
        case GateVerdict.IMPROVEMENT:
            return f"{text}; better beyond the margin of {percent(found.policy.margin)[1:]}: a new baseline is due"
        case _:
            return f"{text}; {_doubt(shown, found, policy)}"


def _doubt(shown: "Comparison", found: "Tested", policy: GatePolicy) -> str:
    fewest, side = min((found.num_runs, "the result"), (found.num_baseline_runs, "the reference"), key=itemgetter(0))
    if fewest < policy.min_runs:
        runs = "one run" if fewest == 1 else f"{fewest} runs"
        return f"{side} has only {runs}, and the policy asks for {policy.min_runs}"
    if found.excess(shown.lower, shown.upper) <= 0:
        return "too large an improvement to be plausible: check the run before it becomes a baseline"
    needed = _runs_needed(shown, found)
    remedy = f"about {needed} runs on each side would decide it" if needed else "more runs are needed to decide it"
    return f"a change beyond {_limits(found)} cannot be ruled out; {remedy}"


def _runs_needed(shown: "Comparison", found: "Tested") -> int | None:
    """Return how many runs per side would put the bounds inside the limits if the change stays the same."""
    room = -found.excess(shown.change, shown.change)
    reach = max(shown.upper - shown.change, shown.change - shown.lower)
    if room <= 0 or reach <= 0:
        return None
    now = 2 / (1 / found.num_runs + 1 / found.num_baseline_runs)
    needed = math.ceil(now * (reach / room) ** 2) + 1
    return needed if needed <= _MOST_RUNS else None


def _limits(found: "Tested") -> str:
    lower, upper = found.bounds
    return " and ".join(percent(upper if sign > 0 else lower) for sign in sorted(found.worse))


def percent(x: float) -> str:
    return f"{100 * x:+.2f} %"


def reasons(texts: Iterable[str]) -> str:
    """Join the reasons of failed runs without duplicates."""
    return "; ".join(text if count == 1 else f"{text} ({count} times)" for text, count in Counter(texts).items())


def slow_runs(runs: Iterable[RunResult], policy: GatePolicy) -> tuple[str, ...]:
    """Report runs far slower than the other runs of their point: their nodes may be slow, not the software."""
    of = METRICS[PRIMARY].of
    measured = [(run, value[0]) for run in runs if (value := of(run))]
    if len(measured) < _FEWEST_FOR_A_MIDDLE:
        return ()
    middle = median(value for _, value in measured)
    spread = _MAD_TO_SD * median(abs(value - middle) for _, value in measured)
    margin = next((m.margin for m in policy.metrics if m.name == PRIMARY), 0.0)
    return tuple(
        f"run {run.iteration} on {', '.join(run.nodes) or 'unknown nodes'} is {percent(value / middle - 1)} from the"
        " median of its point: a slow node, or a busy one?"
        for run, value in measured
        if value - middle > max(_FAR * spread, margin * middle)
    )
