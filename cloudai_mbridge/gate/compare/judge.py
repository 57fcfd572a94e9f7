"""The gate: results against references under a policy, to a verdict per metric, per point and overall.

A regression is larger than the metric's margin, and significant after a correction for everything that this gate
tests. What passes is shown to be smaller than the tolerance. Whatever is neither is inconclusive, and never a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from cloudai_mbridge.gate.compare import words
from cloudai_mbridge.gate.compare.groups import Match, changed, group_by_point, match
from cloudai_mbridge.gate.compare.metric import Tested, draft_metric, settle
from cloudai_mbridge.gate.compare.policy import GatePolicy, MetricPolicy, expired, waiver_for
from cloudai_mbridge.gate.compare.reference import ReferencePoint, run_values
from cloudai_mbridge.gate.compare.statistics import adjust
from cloudai_mbridge.gate.compare.verdict import GateResult, GateVerdict, MetricVerdict, PointVerdict, worst
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS

# The last digits of Megatron-Bridge's lines
_DIGITS_OF_TIME, _DIGITS_OF_RATE = 2, 1


def judge_results(
    policy: GatePolicy,
    references: Sequence[ReferencePoint],
    results: Sequence[RunResult],
    *,
    where: str,
    today: date,
    num_judgements: int = 1,
) -> GateResult:
    """Judge results.

    where: the reference's name. num_judgements: how often these results may be judged, with more runs added in
    between; each judgement gets its share of the false-alarm rate.
    """
    points, notes = group_by_point(results, without={run.run_id for reference in references for run in reference.runs})
    drafts = [_draft(found, policy) for found in match(references, points, where)]
    rate = policy.false_alarm_rate / num_judgements
    tested = [metric for point in drafts for metric in point.tested]
    _correct(tested)
    total_weight = sum(metric.policy.weight for metric in tested)
    verdicts = tuple(_settle(point, policy, (rate, total_weight), today) for point in drafts)
    if num_judgements > 1:
        notes.append(f"{num_judgements} judgements were asked for: each has a false-alarm rate of {rate:.2%}")
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


@dataclass(frozen=True)
class _Draft:
    """A point before the correction: metrics that were compared, and verdicts on those that could not be."""

    match: Match
    tested: tuple[Tested, ...] = ()
    settled: tuple[MetricVerdict, ...] = ()


def _draft(found: Match, policy: GatePolicy) -> _Draft:
    if found.why or found.runs is None or found.reference is None or not found.runs.good:
        return _Draft(found)
    runs = [run_values(run) for run in found.runs.good]
    drafts = [draft_metric(metric, found.reference, found.runs, runs, policy) for metric in policy.metrics]
    return _Draft(
        found,
        tuple(draft for draft in drafts if isinstance(draft, Tested)),
        tuple(draft for draft in drafts if isinstance(draft, MetricVerdict)),
    )


def _correct(tested: Sequence[Tested]) -> None:
    """Adjust all p-values of a gate together, those for the worse and those for the better apart."""
    weights = [metric.policy.weight for metric in tested]
    for metric, worse in zip(tested, adjust([metric.p_worse for metric in tested], weights), strict=True):
        metric.adjusted_worse = worse
    for metric, better in zip(tested, adjust([metric.p_better for metric in tested], weights), strict=True):
        metric.adjusted_better = better


def _settle(draft: _Draft, policy: GatePolicy, terms: tuple[float, float], today: date) -> PointVerdict:
    found, runs = draft.match, draft.match.runs
    own, texts = _point_verdicts(found, policy)
    by_name = {m.metric: m for m in draft.settled}
    by_name |= {m.policy.name: settle(m, policy, *terms) for m in draft.tested}
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
        return [GateVerdict.NOT_RUN], ["the reference has this point, but the result has no run of it"]
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


def _follow(metric: MetricPolicy, leader: MetricVerdict, draft: _Draft) -> MetricVerdict:
    """Show a metric that another one decides: TFLOP/s are the step time in other units."""
    reference, runs = draft.match.reference, draft.match.runs
    old = [run.values[metric.name][0] for run in reference.runs if metric.name in run.values] if reference else []
    new = [v[0] for run in runs.good if (v := METRICS[metric.name].of(run))] if runs else []
    before, after = words.mean(old), words.mean(new)
    rounded = any(map(_is_rounded, runs.good)) if runs else False
    disagrees = _disagrees(metric, leader, before, after, rounded=rounded)
    return MetricVerdict(
        metric=metric.name,
        verdict=GateVerdict.NOT_RUN if disagrees else leader.verdict,
        words=disagrees or f"follows {leader.metric}",
        unit=METRICS[metric.name].unit,
        decides=metric.required and bool(disagrees),
        baseline=before,
        value=after,
        change=after / before - 1 if before and after else None,
        num_runs=len(new),
        num_baseline_runs=len(old),
    )


def _disagrees(
    metric: MetricPolicy, leader: MetricVerdict, before: float | None, after: float | None, *, rounded: bool
) -> str:
    """Return how a rate contradicts the time that it is said to be made of, "" if it does not.

    rounded: both were printed as Megatron-Bridge does, which leaves half of their last digits open.
    """
    if not (before and after and leader.baseline and leader.value):
        return ""
    work = (after * leader.value) / (before * leader.baseline) - 1
    open_rate, open_time = 10**-_DIGITS_OF_RATE / 2, 10**-_DIGITS_OF_TIME / 2
    rounding = open_rate * (1 / before + 1 / after) + open_time * (1 / leader.baseline + 1 / leader.value)
    if abs(work) <= metric.tolerance + (rounding if rounded else 0):
        return ""
    return f"contradicts {leader.metric}: the work of a step, their product, changed by {work:+.1%}"


def _is_rounded(run: RunResult) -> bool:
    """Return whether a run's times and rates come from Megatron-Bridge's lines: records have them at full precision.

    A reference that it may be compared with was run by the same launcher, and is as precise.
    """
    values = [(step.step_time_s, _DIGITS_OF_TIME) for step in run.counted_steps]
    values += [(step.tflops_per_gpu, _DIGITS_OF_RATE) for step in run.counted_steps]
    return all(value is None or round(value, digits) == value for value, digits in values)


def _waive(metric: MetricVerdict, point: str, policy: GatePolicy, today: date) -> MetricVerdict:
    """Take a regression out of the decision if a waiver covers it."""
    if metric.verdict is not GateVerdict.REGRESSION or metric.interval is None:
        return metric
    waiver = waiver_for(policy, point, metric.metric, today)
    if waiver is None:
        return metric
    if max(abs(bound) for bound in metric.interval) > waiver.up_to:
        beyond = f"it may be beyond the {waiver.up_to:.0%} that {waiver.by} has waived"
        return replace(metric, words=f"{metric.words}; {beyond}")
    return replace(
        metric, waived=f"waived up to {waiver.up_to:.0%} until {waiver.until} by {waiver.by}: {waiver.reason}"
    )


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
