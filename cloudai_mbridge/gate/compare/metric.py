"""One metric of one point: comparability, comparison, verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import stdev

from cloudai_mbridge.gate.compare import words
from cloudai_mbridge.gate.compare.groups import PointRuns
from cloudai_mbridge.gate.compare.policy import GatePolicy, MetricPolicy
from cloudai_mbridge.gate.compare.reference import ReferencePoint, RunValues
from cloudai_mbridge.gate.compare.verdict import GateVerdict, MetricVerdict
from cloudai_mbridge.gate.results.values import METRICS, OF_FLOPS
from cloudai_mbridge.gate.statistics.comparison import Comparison, Incomparable, compare_groups

_TOO_GOOD = 0.5  # a larger change for the better is treated as a mistake


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

    def verdict(self, policy: GatePolicy, rate: float) -> GateVerdict:
        """Return the verdict at a false-alarm rate."""
        if self.adjusted_worse <= rate:
            return GateVerdict.REGRESSION
        if min(self.num_runs, self.num_baseline_runs) < policy.min_runs:
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
    metric: MetricPolicy,
    reference: ReferencePoint,
    point: PointRuns,
    runs: Sequence[RunValues],
    policy: GatePolicy,
    known: Comparison | None = None,
) -> Tested | MetricVerdict | None:
    """Compare a metric, or return the reason why not; None if another metric decides, or if it was not measured.

    known: the comparison given all other points of the gate.
    """
    if metric.follows is not None and not any(metric.name in run.values for run in (*reference.runs, *runs)):
        return None
    if why := _forbidden(metric, reference, point):
        return _refuse(metric, GateVerdict.NOT_COMPARABLE, why)
    if why := _gone(metric, reference, runs):
        return _refuse(metric, GateVerdict.NOT_RUN, why, decides=True)
    if metric.follows is not None:
        return None
    old = [run.values[metric.name] for run in reference.runs if metric.name in run.values]
    new = [run.values[metric.name] for run in runs if metric.name in run.values]
    if not old:
        why = "the reference did not measure it"
        return _refuse(metric, GateVerdict.NOT_COMPARABLE, why) if metric.required else None
    if len({len(values) for values in (*old, *new)}) > 1:
        return _refuse(metric, GateVerdict.NOT_COMPARABLE, "the runs' curves have different numbers of stretches")
    compared: list[Comparison | Incomparable] = [known] if known is not None else []
    for sides in zip(zip(*old, strict=True), zip(*new, strict=True), strict=True) if known is None else ():
        floor = METRICS[metric.name].noise_floor
        compared.append(
            compare_groups(*sides, policy.confidence, assumed_noise=policy.assumed_noise, noise_floor=floor)
        )
    if failures := [item for item in compared if isinstance(item, Incomparable)]:
        return _refuse(metric, GateVerdict.INCONCLUSIVE, failures[0].reason)
    comparisons = tuple(item for item in compared if isinstance(item, Comparison))
    lower, upper = reference.bounds.get(metric.name, (-metric.tolerance, metric.tolerance))
    bounds = max(lower, -metric.tolerance), min(upper, metric.tolerance)  # the tighter of the two
    columns = zip(zip(*old, strict=True), zip(*new, strict=True), strict=True)
    noises = tuple((noise_of(before), noise_of(after)) for before, after in columns)
    return Tested(metric, comparisons, bounds, len(new), len(old), noises=noises)


def noise_of(values: Sequence[float]) -> float | None:
    """Return the relative standard deviation of values, None if there is one value or a value is not positive."""
    return stdev(map(math.log, values)) if len(values) > 1 and min(values) > 0 else None


def settle(
    metric: Tested, policy: GatePolicy, rate: float, total_weight: float, *, all_are_worse: bool = False
) -> MetricVerdict:
    """Turn a comparison into a verdict. rate: of false alarms of this judgement. total_weight: of all comparisons.

    all_are_worse: all points together regress; then a point regresses too if its own bounds show it.
    """
    verdict = metric.verdict(policy, rate)
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
        words=where + words.explain(verdict, shown, metric, policy, is_like_all=is_like_all),
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


def _forbidden(metric: MetricPolicy, reference: ReferencePoint, point: PointRuns) -> str:
    """Return why TFLOP/s are not comparable: they are FLOPs by a formula, divided by the time."""
    if metric.name != OF_FLOPS:
        return ""
    for run in point.good:
        if reference.flops_formula is None or run.flops_formula is None:
            return "the runs do not name one formula by which FLOPs were counted"
        if reference.flops_formula != run.flops_formula:
            return f"FLOPs were counted by the formula {reference.flops_formula!r} there, by {run.flops_formula!r} here"
        if reference.flops_per_step != run.flops_per_step:
            return f"a step is {reference.flops_per_step!r} FLOPs there, {run.flops_per_step!r} here"
    return ""


def _gone(metric: MetricPolicy, reference: ReferencePoint, runs: Sequence[RunValues]) -> str:
    """Return how many runs lack a required metric or a metric of the reference, as text."""
    lacking = sum(metric.name not in run.values for run in runs)
    is_known = any(metric.name in run.values for run in reference.runs)
    if lacking and (is_known or lacking < len(runs) or metric.required):
        return f"{lacking} of {len(runs)} runs have not measured it"
    return ""


def _refuse(metric: MetricPolicy, verdict: GateVerdict, reason: str, *, decides: bool | None = None) -> MetricVerdict:
    unit = METRICS[metric.name].unit
    return MetricVerdict(metric.name, verdict, reason, unit, metric.required if decides is None else decides)
