"""The gate: results against references under a policy, to a verdict per metric, per point and overall.

What is called a regression is (1) larger than the metric's margin and (2) significant after a correction for everything
that this gate looks at, so that no change at all is called one in at most `false_alarm_rate` of all gates. What passes
is shown to be smaller than the tolerance. Whatever is neither is inconclusive, and never a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from cloudai_mbridge.gate import words
from cloudai_mbridge.gate.compare import Comparison, Incomparable, compare_groups
from cloudai_mbridge.gate.groups import Match, PointRuns, changed, group_by_point, match
from cloudai_mbridge.gate.holm import adjust
from cloudai_mbridge.gate.policy import GatePolicy, MetricPolicy, expired, waiver_for
from cloudai_mbridge.gate.reference import ReferencePoint, RunValues, run_values
from cloudai_mbridge.gate.results import RunResult
from cloudai_mbridge.gate.values import METRICS, Direction
from cloudai_mbridge.gate.verdict import GateResult, GateVerdict, MetricVerdict, PointVerdict, worst

_TFLOPS = "tflops_per_gpu"


def judge_results(
    policy: GatePolicy,
    references: Sequence[ReferencePoint],
    results: Sequence[RunResult],
    *,
    where: str,
    today: date,
    looks: int = 1,
) -> GateResult:
    """Judge results.

    where: the reference in words. looks: how often these results may be judged with more runs added in between; each
    look gets its share of the false-alarm rate.
    """
    points, notes = group_by_point(results)
    drafts = [_draft(found, policy) for found in match(references, points, where)]
    rate = policy.false_alarm_rate / looks
    _correct([metric for point in drafts for metric in point.tested])
    verdicts = tuple(_settle(point, policy, rate, today) for point in drafts)
    notes += [
        f"the waiver of {waiver.metric} at {waiver.point} expired on {waiver.until}: {waiver.reason}"
        for waiver in expired(policy, today)
    ]
    return GateResult(
        policy=policy.name,
        reference=where,
        verdict=worst(point.verdict for point in verdicts),
        points=verdicts,
        false_alarm_rate=policy.false_alarm_rate,
        notes=tuple(notes),
        environment_changes=_environment_changes(drafts),
        improvement_fails=policy.fail_on_improvement,
    )


@dataclass
class _Tested:
    """A metric whose groups were compared. p_worse and p_better are 1 for changes within the margin."""

    policy: MetricPolicy
    comparisons: tuple[Comparison, ...]
    bounds: tuple[float, float]
    num_runs: int
    num_baseline_runs: int
    p_worse: float
    p_better: float
    adjusted_worse: float = 1.0
    adjusted_better: float = 1.0


@dataclass(frozen=True)
class _Draft:
    """A point before the correction: metrics that were compared, and verdicts on those that could not be."""

    match: Match
    tested: tuple[_Tested, ...] = ()
    settled: tuple[MetricVerdict, ...] = ()


def _draft(found: Match, policy: GatePolicy) -> _Draft:
    if found.why or found.runs is None or found.reference is None or not found.runs.good:
        return _Draft(found)
    runs = [run_values(run) for run in found.runs.good]
    drafts = [
        _draft_metric(metric, found.reference, found.runs, runs, policy)
        for metric in policy.metrics
        if metric.follows is None
        or _forbidden(metric, found.reference, found.runs)
        or _gone(metric, found.reference, runs)
    ]
    return _Draft(
        found,
        tuple(draft for draft in drafts if isinstance(draft, _Tested)),
        tuple(draft for draft in drafts if isinstance(draft, MetricVerdict)),
    )


def _draft_metric(
    metric: MetricPolicy, reference: ReferencePoint, point: PointRuns, runs: Sequence[RunValues], policy: GatePolicy
) -> _Tested | MetricVerdict | None:
    """Compare a metric, or say why that is impossible; None for an optional one that nobody measured."""
    if forbidden := _forbidden(metric, reference, point):
        return _refuse(metric, GateVerdict.NOT_COMPARABLE, forbidden)
    if gone := _gone(metric, reference, runs):
        return _refuse(metric, GateVerdict.NOT_RUN, gone, decides=True)
    old = [run.values[metric.name] for run in reference.runs if metric.name in run.values]
    new = [run.values[metric.name] for run in runs if metric.name in run.values]
    if not old:
        if not metric.required:
            return None
        return _refuse(metric, GateVerdict.NOT_COMPARABLE, "the reference did not measure it")
    if len({len(values) for values in (*old, *new)}) > 1:
        return _refuse(metric, GateVerdict.NOT_COMPARABLE, "the runs have different numbers of steps")
    is_tight = METRICS[metric.name].may_repeat
    columns = zip(zip(*old, strict=True), zip(*new, strict=True), strict=True)
    compared = [
        compare_groups(before, after, policy.confidence, assumed_noise=policy.assumed_noise, may_repeat=is_tight)
        for before, after in columns
    ]
    if failures := [item for item in compared if isinstance(item, Incomparable)]:
        return _refuse(metric, GateVerdict.INCONCLUSIVE, failures[0].reason)
    comparisons = tuple(item for item in compared if isinstance(item, Comparison))
    return _Tested(
        policy=metric,
        comparisons=comparisons,
        bounds=reference.bounds.get(metric.name, (-metric.tolerance, metric.tolerance)),
        num_runs=len(new),
        num_baseline_runs=len(old),
        p_worse=_p_value(comparisons, _worse(metric), metric.margin),
        p_better=_p_value(comparisons, _better(metric), metric.margin),
    )


def _forbidden(metric: MetricPolicy, reference: ReferencePoint, point: PointRuns) -> str:
    """Return why TFLOP/s must not be compared: they are FLOPs by a formula, divided by the time."""
    if metric.name != _TFLOPS:
        return ""
    here = point.good[0]
    if reference.flops_formula is None or here.flops_formula is None:
        return "nothing says by which formula the FLOPs were counted"
    if reference.flops_formula != here.flops_formula:
        return f"FLOPs were counted by the formula {reference.flops_formula!r} there, by {here.flops_formula!r} here"
    if reference.flops_per_step != here.flops_per_step:
        return f"a step is {reference.flops_per_step!r} FLOPs there, {here.flops_per_step!r} here"
    return ""


def _gone(metric: MetricPolicy, reference: ReferencePoint, runs: Sequence[RunValues]) -> str:
    """Return what is missing of a metric that the reference has."""
    lacking = sum(metric.name not in run.values for run in runs)
    is_known = any(metric.name in run.values for run in reference.runs)
    if lacking and (is_known or lacking < len(runs) or metric.required):
        return f"{lacking} of {len(runs)} runs have not measured it"
    return ""


def _refuse(metric: MetricPolicy, verdict: GateVerdict, reason: str, *, decides: bool | None = None) -> MetricVerdict:
    unit = METRICS[metric.name].unit
    return MetricVerdict(metric.name, verdict, reason, unit, metric.required if decides is None else decides)


def _worse(metric: MetricPolicy) -> tuple[int, ...]:
    """Return the signs of a change for the worse."""
    return {Direction.LOWER: (1,), Direction.HIGHER: (-1,), Direction.SAME: (1, -1)}[METRICS[metric.name].direction]


def _better(metric: MetricPolicy) -> tuple[int, ...]:
    return {Direction.LOWER: (-1,), Direction.HIGHER: (1,), Direction.SAME: ()}[METRICS[metric.name].direction]


def _p_value(comparisons: Sequence[Comparison], signs: Sequence[int], margin: float) -> float:
    """Return the p-value of the most telling place, corrected for the number of places and signs looked at."""
    found = [c.p_larger if sign > 0 else c.p_smaller for c in comparisons for sign in signs if sign * c.change > margin]
    return min(1.0, min(found) * len(comparisons) * len(signs)) if found else 1.0


def _correct(tested: Sequence[_Tested]) -> None:
    """Adjust all p-values of a gate together, those for the worse and those for the better apart."""
    weights = [metric.policy.weight for metric in tested]
    for metric, worse in zip(tested, adjust([metric.p_worse for metric in tested], weights), strict=True):
        metric.adjusted_worse = worse
    for metric, better in zip(tested, adjust([metric.p_better for metric in tested], weights), strict=True):
        metric.adjusted_better = better


def _settle(draft: _Draft, policy: GatePolicy, rate: float, today: date) -> PointVerdict:
    found, runs = draft.match, draft.match.runs
    own, texts = _point_verdicts(found, policy)
    by_name = {m.metric: m for m in draft.settled}
    by_name |= {m.policy.name: _settle_metric(m, policy, rate) for m in draft.tested}
    for metric in policy.metrics:
        if metric.follows in by_name and metric.name not in by_name:
            by_name[metric.name] = _follow(metric, by_name[metric.follows], draft)
    names = [metric.name for metric in policy.metrics if metric.name in by_name]
    metrics = tuple(_waive(by_name[name], found.point, policy, today) for name in names)
    deciding = [m.verdict for m in metrics if m.decides and not m.waived]
    passes = [GateVerdict.PASS] if metrics else []
    return PointVerdict(
        point=found.point,
        verdict=worst([*own, *deciding, *passes]),
        words=(*texts, *(words.slow_runs(found, policy) if draft.tested else ())),
        metrics=metrics,
        runs=tuple(run.run_id for run in runs.good) if runs else (),
        nodes=tuple(sorted({node for run in runs.good for node in run.nodes})) if runs else (),
    )


def _point_verdicts(found: Match, policy: GatePolicy) -> tuple[list[GateVerdict], list[str]]:
    """Return what speaks against the point as a whole."""
    if found.runs is None:
        return [GateVerdict.NOT_RUN], ["the reference has this point, the result has no run of it"]
    verdicts, texts = [], []
    failed = found.runs.failed
    if len(failed) > policy.max_failed_runs or not found.runs.good:
        verdicts.append(GateVerdict.NOT_RUN)
        total = len(failed) + len(found.runs.good)
        texts.append(f"{len(failed)} of {total} runs failed: {words.reasons(why for _, why in failed)}")
    if found.why:
        verdicts.append(GateVerdict.NOT_COMPARABLE)
        texts.append(found.why)
    return verdicts, texts


def _settle_metric(metric: _Tested, policy: GatePolicy, rate: float) -> MetricVerdict:
    verdict = _verdict(metric, policy, rate)
    shown = _most_telling(metric)
    share = rate * metric.policy.weight / sum(m.weight for m in policy.metrics if m.follows is None)
    return MetricVerdict(
        metric=metric.policy.name,
        verdict=verdict,
        words=words.explain(verdict, shown, metric.bounds, metric.policy, policy, metric),
        unit=METRICS[metric.policy.name].unit,
        decides=metric.policy.required or verdict is not GateVerdict.INCONCLUSIVE,
        baseline=shown.baseline,
        value=shown.value,
        change=shown.change,
        interval=(shown.lower, shown.upper),
        confidence=policy.confidence,
        p_value=metric.p_worse,
        adjusted_p=metric.adjusted_worse,
        detectable=shown.detectable(share),
        num_runs=metric.num_runs,
        num_baseline_runs=metric.num_baseline_runs,
    )


def _verdict(metric: _Tested, policy: GatePolicy, rate: float) -> GateVerdict:
    if metric.adjusted_worse <= rate:
        return GateVerdict.REGRESSION
    if min(metric.num_runs, metric.num_baseline_runs) < policy.min_runs:
        return GateVerdict.INCONCLUSIVE
    if metric.adjusted_better <= rate:
        return GateVerdict.IMPROVEMENT
    return GateVerdict.PASS if all(_is_within(c, metric) for c in metric.comparisons) else GateVerdict.INCONCLUSIVE


def _is_within(comparison: Comparison, metric: _Tested) -> bool:
    """Return whether a change for the worse beyond the bounds can be ruled out."""
    lower, upper = metric.bounds
    signs = _worse(metric.policy)
    return (1 not in signs or comparison.upper <= upper) and (-1 not in signs or comparison.lower >= lower)


def _most_telling(metric: _Tested) -> Comparison:
    """Return the place of a curve with the largest change; a plain metric has one place."""
    return max(metric.comparisons, key=lambda c: abs(c.change))


def _follow(metric: MetricPolicy, leader: MetricVerdict, draft: _Draft) -> MetricVerdict:
    """Show a metric that another one decides: TFLOP/s are the step time in other units."""
    reference, runs = draft.match.reference, draft.match.runs
    old = [run.values[metric.name][0] for run in reference.runs if metric.name in run.values] if reference else []
    new = [v[0] for run in runs.good if (v := METRICS[metric.name].of(run))] if runs else []
    before, after = words.mean(old), words.mean(new)
    return MetricVerdict(
        metric=metric.name,
        verdict=leader.verdict,
        words=f"follows {leader.metric}",
        unit=METRICS[metric.name].unit,
        decides=False,
        baseline=before,
        value=after,
        change=after / before - 1 if before and after else None,
        num_runs=len(new),
        num_baseline_runs=len(old),
    )


def _waive(metric: MetricVerdict, point: str, policy: GatePolicy, today: date) -> MetricVerdict:
    """Take a regression, or a doubt, out of the decision if somebody has said why and until when."""
    if metric.verdict not in (GateVerdict.REGRESSION, GateVerdict.INCONCLUSIVE) or not metric.decides:
        return metric
    waiver = waiver_for(policy, point, metric.metric, today)
    if waiver is None:
        return metric
    return replace(metric, waived=f"waived until {waiver.until} by {waiver.by}: {waiver.reason}")


def _environment_changes(drafts: Sequence[_Draft]) -> Mapping[str, Any]:
    """Return what is new in the environment of the compared runs."""
    changes: dict[str, Any] = {}
    for draft in drafts:
        if draft.match.reference is not None and draft.match.runs is not None and draft.match.runs.good:
            old, new = flatten(draft.match.reference.environment), flatten(draft.match.runs.good[0].environment)
            known = {name: pair for name, pair in changed(old, new).items() if None not in pair}
            changes = known | changes
    return changes


def flatten(environment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested facts under dotted names; nodes are left out, they change from run to run."""
    flat: dict[str, Any] = {}
    for name, value in environment.items():
        if name == "nodes":
            continue
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
