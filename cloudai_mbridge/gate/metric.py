"""One metric of one point: comparability, comparison, verdict, and the verdict as a sentence with its numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.policy import GatePolicy, MetricPolicy
from cloudai_mbridge.gate.runs import METRICS, OF_FLOPS, PointRuns, ReferencePoint, noise_of
from cloudai_mbridge.gate.statistics import Comparison, compare_groups
from cloudai_mbridge.gate.verdict import GateVerdict, MetricVerdict, percent

_TOO_GOOD = 0.5  # a larger change for the better is treated as a mistake
_MOST_RUNS = 100
_SMALLEST_P = 1e-9


@dataclass
class Tested:
    """A metric whose groups were compared, place by place of a curve.

    bounds: (lower, upper), the relative changes within which it passes. adjusted_*: the p-values after the correction.
    noises: by place, the relative standard deviations between the runs of the reference and of the result.
    """

    policy: MetricPolicy
    comparisons: tuple[Comparison, ...]
    bounds: tuple[float, float]
    num_runs: int
    num_baseline_runs: int
    adjusted_worse: float = 1.0
    adjusted_better: float = 1.0
    noises: tuple[tuple[float | None, float | None], ...] = ()

    @property
    def worse(self) -> tuple[int, ...]:
        """The signs of a change for the worse."""
        return METRICS[self.policy.name].direction.worse

    @cached_property
    def p_worse(self) -> float:
        return self._p_value(self.worse)

    @cached_property
    def p_better(self) -> float:
        return self._p_value([-sign for sign in self.worse] if len(self.worse) == 1 else ())

    def verdict(self, min_runs: int, rate: float) -> GateVerdict:
        """Return the verdict at a false-alarm rate. min_runs: with fewer on a side nothing passes."""
        if self.adjusted_worse <= rate:
            return GateVerdict.REGRESSION
        if min(self.num_runs, self.num_baseline_runs) < min_runs:
            return GateVerdict.INCONCLUSIVE
        if self.adjusted_better <= rate:
            is_odd = abs(self.comparisons[0].change) > _TOO_GOOD
            return GateVerdict.INCONCLUSIVE if is_odd else GateVerdict.IMPROVEMENT
        is_within = all(self.excess(c.lower, c.upper) <= 0 for c in self.comparisons)
        return GateVerdict.PASS if is_within else GateVerdict.INCONCLUSIVE

    def excess(self, lower: float, upper: float) -> float:
        """Return how far an interval extends beyond the bounds, for the worse."""
        return max((upper - self.bounds[1]) if sign > 0 else (self.bounds[0] - lower) for sign in self.worse)

    @property
    def is_beyond_the_margin(self) -> bool:
        """Whether a bound shows a change for the worse that is larger than the margin."""
        margin = self.policy.margin
        return any(c.lower > margin if sign > 0 else c.upper < -margin for c in self.comparisons for sign in self.worse)

    def decisive_index(self, verdict: GateVerdict) -> int:
        """Return the place that decides the verdict."""
        places = range(len(self.comparisons))
        if verdict is GateVerdict.REGRESSION:
            return min(places, key=lambda i: self._p_at(self.comparisons[i], self.worse))
        return max(places, key=lambda i: self.excess(self.comparisons[i].lower, self.comparisons[i].upper))

    def _p_value(self, signs: Sequence[int]) -> float:
        """Return the smallest p-value of all places, corrected for the number of places and signs tested."""
        found = [self._p_at(c, signs) for c in self.comparisons] if signs else []
        return min(1.0, min(found) * len(self.comparisons) * len(signs)) if found else 1.0

    def _p_at(self, c: Comparison, signs: Sequence[int]) -> float:
        """Return the p-value of one place; 1 within the margin."""
        margin = min(self.policy.margin, self.bounds[1], -self.bounds[0])
        found = [c.p_larger if sign > 0 else c.p_smaller for sign in signs if sign * c.change > margin]
        return min(found, default=1.0)


def draft_metric(
    metric: MetricPolicy, point: PointRuns, policy: GatePolicy, known: Comparison | None
) -> Tested | MetricVerdict | None:
    """Compare a metric, or return the reason why not; None if another metric decides, or if it was not measured.

    point: with a reference. known: the comparison given all other points of the gate.
    """
    reference = point.reference
    assert reference is not None
    old = [run.values[metric.name] for run in reference.runs if metric.name in run.values]
    new = [run.values[metric.name] for run in point.good if metric.name in run.values]
    if metric.follows is not None and not (old or new):
        return None

    def refuse(verdict: GateVerdict, reason: str, *, decides: bool = metric.required) -> MetricVerdict:
        return MetricVerdict(metric.name, verdict, reason, METRICS[metric.name].unit, decides)

    if metric.name == OF_FLOPS and (why := _count_otherwise(reference, point)):
        return refuse(GateVerdict.NOT_COMPARABLE, why)
    lacking = len(point.good) - len(new)
    if lacking and (old or new or metric.required):
        why = f"{lacking} of {len(point.good)} runs have not measured it"
        return refuse(GateVerdict.NOT_RUN, why, decides=True)
    if metric.follows is not None:
        return None
    if not old:
        why = "the reference did not measure it"
        return refuse(GateVerdict.NOT_COMPARABLE, why) if metric.required else None
    if len({len(values) for values in (*old, *new)}) > 1:
        return refuse(GateVerdict.NOT_COMPARABLE, "the runs' curves have different numbers of stretches")
    comparisons, noises = [known] if known is not None else [], []
    for before, after in zip(zip(*old, strict=True), zip(*new, strict=True), strict=True):
        noises.append((noise_of(before), noise_of(after)))
        if known is None:
            floor = METRICS[metric.name].noise_floor
            found = compare_groups(
                before, after, policy.confidence, assumed_noise=policy.assumed_noise, noise_floor=floor
            )
            if isinstance(found, str):
                return refuse(GateVerdict.INCONCLUSIVE, found)
            comparisons.append(found)
    lower, upper = reference.bounds.get(metric.name, (-metric.tolerance, metric.tolerance))
    bounds = max(lower, -metric.tolerance), min(upper, metric.tolerance)  # the tighter of the two
    return Tested(metric, tuple(comparisons), bounds, len(new), len(old), noises=tuple(noises))


def _count_otherwise(reference: ReferencePoint, point: PointRuns) -> str:
    """Return why TFLOP/s are not comparable: they are FLOPs by a formula, divided by the time."""
    for run in point.good:
        if reference.flops_formula is None or run.flops_formula is None:
            return "the runs do not name one formula by which FLOPs were counted"
        if reference.flops_formula != run.flops_formula:
            return f"FLOPs were counted by the formula {reference.flops_formula!r} there, by {run.flops_formula!r} here"
        if reference.flops_per_step != run.flops_per_step:
            return f"a step is {reference.flops_per_step!r} FLOPs there, {run.flops_per_step!r} here"
    return ""


def settle(
    metric: Tested, policy: GatePolicy, rate: float, total_weight: float, *, all_are_worse: bool = False
) -> MetricVerdict:
    """Turn a comparison into a verdict. rate: of false alarms of this judgement. total_weight: of all comparisons.

    all_are_worse: all points together regress; then a point regresses too if its own bounds show it.
    """
    verdict = metric.verdict(policy.min_runs, rate)
    is_like_all = all_are_worse and verdict is GateVerdict.INCONCLUSIVE and metric.is_beyond_the_margin
    verdict = GateVerdict.REGRESSION if is_like_all else verdict
    place = metric.decisive_index(verdict)
    shown = metric.comparisons[place]
    share = rate * metric.policy.weight / total_weight / (len(metric.comparisons) * len(metric.worse))
    growth = shown.detectable(share, metric.policy.margin)
    is_beyond = any(metric.excess(c.change, c.change) > 0 for c in metric.comparisons)  # the change, not only its bound
    where = f"in stretch {place + 1} of {len(metric.comparisons)}: " if len(metric.comparisons) > 1 else ""
    return MetricVerdict(
        metric=metric.policy.name,
        verdict=verdict,
        words=where + _explain(verdict, shown, metric, policy, is_like_all=is_like_all),
        unit=METRICS[metric.policy.name].unit,
        decides=metric.policy.required or verdict is not GateVerdict.INCONCLUSIVE or is_beyond,
        baseline=shown.baseline,
        value=shown.value,
        change=shown.change,
        interval=(shown.lower, shown.upper),
        confidence=policy.confidence,
        p_value=metric.p_worse,
        adjusted_p=metric.adjusted_worse,
        detectable=growth if 1 in metric.worse else -growth / (1 + growth),
        num_runs=metric.num_runs,
        num_baseline_runs=metric.num_baseline_runs,
        is_significant=is_like_all or min(metric.adjusted_worse, metric.adjusted_better) <= rate,
        baseline_noise=metric.noises[place][0],
        noise=metric.noises[place][1],
    )


def _explain(verdict: GateVerdict, shown: Comparison, found: Tested, policy: GatePolicy, *, is_like_all: bool) -> str:
    """Explain a verdict with its numbers. is_like_all: it is as bad as the change of all points."""
    runs = f"{counted(found.num_runs, 'run')} against {found.num_baseline_runs}"
    bounds = f"{policy.confidence * 100:.4g} % bounds {percent(shown.lower)} and {percent(shown.upper)}"
    text = f"{percent(shown.change)} ({shown.baseline:.5g} to {shown.value:.5g}, {bounds}, {runs})"
    lower, upper = found.bounds
    limits = " and ".join(percent(upper if sign > 0 else lower) for sign in sorted(found.worse))
    match verdict:
        case GateVerdict.REGRESSION if is_like_all:
            return f"{text}; as all points are"
        case GateVerdict.REGRESSION:
            margin = math.copysign(found.policy.margin, shown.change)
            p = found.adjusted_worse
            probability = f"p = {p:.2g}" if p >= _SMALLEST_P else f"p < {_SMALLEST_P:.0g}"
            return f"{text}; beyond the margin of {percent(margin)}, {probability}"
        case GateVerdict.PASS:
            return f"{text}; within {limits}"
        case GateVerdict.IMPROVEMENT:
            return f"{text}; better beyond the margin of {percent(found.policy.margin)[1:]}: a new baseline is due"
    fewest, side = min((found.num_runs, "the result"), (found.num_baseline_runs, "the reference"), key=itemgetter(0))
    if fewest < policy.min_runs:
        few = "one run" if fewest == 1 else f"{fewest} runs"
        return f"{text}; {side} has only {few}, and the policy requires {policy.min_runs}"
    if found.excess(shown.lower, shown.upper) <= 0:
        return f"{text}; too large an improvement to be plausible: check the run before it becomes a baseline"
    needed = _runs_needed(shown, found)
    remedy = f"about {needed} runs on each side would decide it" if needed else "more runs are needed to decide it"
    return f"{text}; a change beyond {limits} cannot be ruled out; {remedy}"


def _runs_needed(shown: Comparison, found: Tested) -> int | None:
    """Return how many runs per side would put the bounds inside the limits if the change stays the same."""
    room = -found.excess(shown.change, shown.change)
    reach = max(shown.upper - shown.change, shown.change - shown.lower)
    if room <= 0 or reach <= 0:
        return None
    now = 2 / (1 / found.num_runs + 1 / found.num_baseline_runs)
    needed = math.ceil(now * (reach / room) ** 2) + 1
    return needed if needed <= _MOST_RUNS else None
