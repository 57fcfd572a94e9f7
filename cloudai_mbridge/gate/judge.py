"""The gate: judge results against references under a policy, per metric, per point and overall.

A regression is larger than the metric's margin, and significant after a correction for all tests of this gate. A pass
is shown to be smaller than the tolerance. Anything else is inconclusive, and never a pass.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from statistics import fmean, geometric_mean, median
from types import MappingProxyType
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.metric import Tested, draft_metric, settle
from cloudai_mbridge.gate.policy import GatePolicy, MetricPolicy, expired, waiver_for
from cloudai_mbridge.gate.runs import (
    METRICS,
    PointRuns,
    ReferencePoint,
    RunResult,
    changed,
    group_by_point,
    name_changes,
    noise_of,
)
from cloudai_mbridge.gate.shared import (
    compare_suites,
    draft_shared,
    metrics_that_are_worse,
    node_notes,
    settle_shared,
    slow_nodes,
)
from cloudai_mbridge.gate.statistics import adjust
from cloudai_mbridge.gate.suite import Suite
from cloudai_mbridge.gate.verdict import GREEN, GateResult, GateVerdict, MetricVerdict, PointVerdict, percent, worst
from cloudai_mbridge.metrics import PRIMARY

# Decimals in Megatron-Bridge's lines; times from its iteration lines have two more
_DIGITS_OF_TIME, _FINER_DIGITS_OF_TIME, _DIGITS_OF_RATE = 2, 4, 1
_BLIND = 0.25  # a slowdown that a gate should see
_FAR = 4.0  # robust standard deviations
_MAD_TO_SD = 1.4826
_FEWEST_FOR_A_MIDDLE = 4
_NOT_SET = "(not set)"
_RANKS = {"variables": 0, "benchmark": 1}  # of facts


def judge_results(
    policy: GatePolicy,
    references: Sequence[ReferencePoint],
    results: Sequence[RunResult],
    *,
    where: str,
    today: date,
    num_judgements: int = 1,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> GateResult:
    """Judge results.

    where: name of the reference. num_judgements: number of interim looks at these results, with more runs added in
    between; each look gets its share of the false-alarm rate. left_out: points that were not chosen to run, and why.
    """
    points, notes = group_by_point(results, without={run.run_id for reference in references for run in reference.runs})
    points = _match(references, points, where, left_out)
    suites = compare_suites([point for point in points if point.is_comparable], policy)
    drafts = [_draft(point, policy, suites) for point in points]
    rate = policy.false_alarm_rate / num_judgements
    tested = [metric for draft in drafts for metric in draft.values() if isinstance(metric, Tested)]
    together = draft_shared(suites, policy.metrics, tested)
    everything = [*tested, *(test for _, test in together)]
    # All together, but separately for changes for the worse and for the better
    weights = [metric.policy.weight for metric in everything]
    worse = adjust([metric.p_worse for metric in everything], weights)
    better = adjust([metric.p_better for metric in everything], weights)
    for i, metric in enumerate(everything):
        metric.adjusted_worse, metric.adjusted_better = worse[i], better[i]
    shared = settle_shared(together, suites, policy, rate, today)
    terms = rate, sum(weights), metrics_that_are_worse(shared)
    verdicts = tuple(_settle(*each, policy, terms, today) for each in zip(points, drafts, strict=True))
    nodes = slow_nodes(suites)
    notes += node_notes(nodes)
    if num_judgements > 1:
        notes.append(f"{num_judgements} judgements: each has a false-alarm rate of {rate:.2%}")
    blind = [(m.detectable, point.point) for point in verdicts for m in point.metrics if _is_blind(point, m)]
    if blind:
        most, name = max((abs(detectable or 0.0), name) for detectable, name in blind)
        notes.append(
            f"{counted(len(blind), 'point')} passed by runs so few or noisy that a smaller slowdown than {most:.0%}"
            f" ({name}) would be missed"
        )
    notes += [
        f"the waiver of {waiver.metric} at {waiver.point} expired on {waiver.until}: {waiver.reason}"
        for waiver in expired(policy, today)
    ]
    return GateResult(
        policy=policy.name,
        reference=where,
        verdict=worst(
            point.verdict for point in (*(p for p in shared if p.verdict is not GateVerdict.PASS), *verdicts)
        ),
        points=verdicts,
        false_alarm_rate=policy.false_alarm_rate,
        notes=tuple(notes),
        environment_changes=_environment_changes(points),
        improvement_fails=policy.fail_on_improvement,
        shared=shared,
        slow_nodes=nodes,
    )


def _is_blind(point: PointVerdict, metric: MetricVerdict) -> bool:
    """Return whether a point passed although its comparison could not have found a large slowdown."""
    is_large = metric.detectable is not None and abs(metric.detectable) > _BLIND
    return point.verdict in GREEN and metric.metric == PRIMARY and is_large


def _match(
    references: Sequence[ReferencePoint], points: Sequence[PointRuns], where: str, left_out: Mapping[str, str]
) -> list[PointRuns]:
    """Give the points of a result their references: by comparability, else by name to report the differences.

    Points that were not run follow. where: name of the reference, for messages.
    """
    found, used, run = list[PointRuns](), set[tuple[str, str]](), {point.point for point in points}
    for point in points:
        same_name = [reference for reference in references if reference.point == point.point]
        ids = {run.comparability_id for run in point.good}
        same_work = [reference for reference in references if ids == {reference.comparability_id}]
        both = [reference for reference in same_name if reference in same_work]
        reference = next(iter([*both, *same_work, *same_name]), None)
        if reference is None:
            why = f"{where} has nothing to compare it with"
        else:
            used.add((reference.point, reference.comparability_id))
            why = _difference(reference, point)
        found.append(replace(point, reference=reference, why=why))
    missing = [each for each in references if (each.point, each.comparability_id) not in used]
    why_missing = {name: f"left out: {text}" for name, text in left_out.items() if name not in run}
    found += [PointRuns(each.point, reference=each, why=why_missing.get(each.point, "")) for each in missing]
    known = {each.point for each in missing}
    return [*found, *(PointRuns(name, why=text) for name, text in why_missing.items() if name not in known)]


def _difference(reference: ReferencePoint, point: PointRuns) -> str:
    """Return why the good runs and the reference are not comparable, "" if they are."""
    for run in point.good:
        if not run.comparability_id or not reference.comparability_id:
            return "its comparability fields are missing; write the report again with this mbridge"
        if run.comparability_id != reference.comparability_id:
            changes = changed(reference.comparability, run.comparability)
            return f"differs in {name_changes(changes, '{}: {!r} there, {!r} here') or 'its comparability key'}"
    return ""


def _draft(point: PointRuns, policy: GatePolicy, suites: Mapping[str, Suite]) -> dict[str, Tested | MetricVerdict]:
    """Return the metrics of a point before the correction: comparisons, or verdicts if not comparable."""
    if not point.is_comparable:
        return {}
    known = {name: suite.comparisons.get(point.point) for name, suite in suites.items()}
    found = {metric.name: draft_metric(metric, point, policy, known.get(metric.name)) for metric in policy.metrics}
    return {name: draft for name, draft in found.items() if draft is not None}


def _settle(
    found: PointRuns,
    draft: Mapping[str, Tested | MetricVerdict],
    policy: GatePolicy,
    terms: tuple[float, float, Mapping[str, bool]],
    today: date,
) -> PointVerdict:
    own, texts = _point_verdicts(found, policy)
    rate, weight, worse = terms
    by_name = {
        name: settle(m, policy, rate, weight, all_are_worse=name in worse) if isinstance(m, Tested) else m
        for name, m in draft.items()
    }
    for name, m in draft.items():  # a waived common change makes only waived metrics regressions
        if worse.get(name) and isinstance(m, Tested) and not _waive(by_name[name], found.point, policy, today).waived:
            by_name[name] = settle(m, policy, rate, weight)
    for metric in policy.metrics:
        is_measured = any(metric.name in run.values for run in (*found.old, *found.good))
        if metric.follows in by_name and metric.name not in by_name and is_measured:
            by_name[metric.name] = _follow(metric, by_name[metric.follows], found)
    metrics = tuple(_waive(by_name[m.name], found.point, policy, today) for m in policy.metrics if m.name in by_name)
    deciding = [m.verdict for m in metrics if m.decides and not m.waived]
    passes = [GateVerdict.PASS] if metrics else []
    is_tested = any(isinstance(m, Tested) for m in draft.values()) and GateVerdict.NOT_RUN not in deciding
    return PointVerdict(
        point=found.point,
        verdict=worst([*own, *deciding, *passes]),
        words=(*texts, *(_slow_runs(found.good, policy) if is_tested else ())),
        metrics=metrics,
        runs=tuple(run.run_id for run in found.good),
        nodes=tuple(sorted({node for run in found.good for node in run.nodes})),
    )


def _point_verdicts(found: PointRuns, policy: GatePolicy) -> tuple[list[GateVerdict], list[str]]:
    """Return the point-level failures, as verdicts and texts."""
    num_good, total = len(found.good), len(found.good) + len(found.failed)
    if not total:
        return [GateVerdict.NOT_RUN], [found.why or "the reference has this point, but the result has no run of it"]
    verdicts, texts = [], []
    if len(found.failed) > policy.max_failed_runs or not found.good:
        verdicts.append(GateVerdict.NOT_RUN)
        needed = max(1, total - policy.max_failed_runs)
        counts = Counter(why for _, why in found.failed).items()
        why = "; ".join(text if count == 1 else f"{text} ({count} times)" for text, count in counts)
        texts.append(
            f"{num_good} of {counted(total, 'run')} {'was' if total == 1 else 'were'} good;"
            f" {needed} {'is' if needed == 1 else 'are'} needed: {why}"
        )
    if found.why:
        verdicts.append(GateVerdict.NOT_COMPARABLE)
        texts.append(found.why)
    return verdicts, texts


def _slow_runs(runs: Sequence[RunResult], policy: GatePolicy) -> tuple[str, ...]:
    """Report runs far slower than the other runs of their point: their nodes may be slow, not the software."""
    measured = [(run, run.values[PRIMARY][0]) for run in runs if PRIMARY in run.values]
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


def _follow(metric: MetricPolicy, leader: MetricVerdict, found: PointRuns) -> MetricVerdict:
    """Report a metric that another metric decides: TFLOP/s are the step time in other units."""
    sides = {
        name: [[run.values[name][0] for run in side if name in run.values] for side in (found.old, found.good)]
        for name in (leader.metric, metric.name)
    }
    old, new = sides[metric.name]
    before, after = (fmean(values) if values else None for values in (old, new))
    # The values of the runs: the leader's verdict may exclude the effects of slow nodes, which the rates contain
    times, rates = (
        [geometric_mean(values) for values in sides[name] if values] for name in (leader.metric, metric.name)
    )
    is_rounded = any(map(_is_rounded, found.good))
    is_known = leader.baseline is not None and len(times) == len(rates) == 2
    disagrees = _disagrees(metric, leader.metric, times, rates, rounded=is_rounded) if is_known else ""
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
        is_significant=leader.is_significant,
        baseline_noise=noise_of(old),
        noise=noise_of(new),
    )


def _disagrees(
    metric: MetricPolicy, leader: str, times: Sequence[float], rates: Sequence[float], *, rounded: bool
) -> str:
    """Return how rates contradict the times that they are computed from, "" if they do not.

    times, rates: of the reference and of the result. rounded: they are rounded as in Megatron-Bridge's lines, with an
    error of up to half of the last digit.
    """
    (old_time, new_time), (old_rate, new_rate) = times, rates
    work = (new_rate * new_time) / (old_rate * old_time) - 1
    open_rate, open_time = 10**-_DIGITS_OF_RATE / 2, 10**-_DIGITS_OF_TIME / 2
    rounding = open_rate * (1 / old_rate + 1 / new_rate) + open_time * (1 / old_time + 1 / new_time)
    if abs(work) <= metric.tolerance + (rounding if rounded else 0):
        return ""
    return f"contradicts {leader}: the work of a step, their product, changed by {work:+.1%}"


def _is_rounded(run: RunResult) -> bool:
    """Return whether a run's times and rates come from Megatron-Bridge's lines: records have them at full precision.

    A comparable reference was run by the same launcher; its times may be coarser if it is older.
    """
    steps = run.counted_steps
    values = [(step.step_time_s, _FINER_DIGITS_OF_TIME) for step in steps]
    values += [(step.tflops_per_gpu, _DIGITS_OF_RATE) for step in steps]
    return all(value is None or round(value, digits) == value for value, digits in values)


def _waive(metric: MetricVerdict, point: str, policy: GatePolicy, today: date) -> MetricVerdict:
    """Exclude a regression from the decision if a waiver covers it."""
    if metric.verdict is not GateVerdict.REGRESSION or metric.interval is None:
        return metric
    waiver = waiver_for(policy, point, metric.metric, today)
    if waiver is None:
        return metric
    limit = f"{waiver.up_to:.0%}"
    if max(map(abs, metric.interval)) > waiver.up_to:
        return replace(metric, words=f"{metric.words}; it may be beyond the {limit} that {waiver.by} has waived")
    return replace(metric, waived=f"waived up to {limit} until {waiver.until} by {waiver.by}: {waiver.reason}")


def _environment_changes(points: Sequence[PointRuns]) -> Mapping[str, Any]:
    """Return the differences between the environments of the compared runs, of facts known to both.

    The likeliest causes first, as the terminal shows a few: the author's settings, the benchmark's commit, others.
    """
    changes: dict[str, Any] = {}
    for point in points:
        if point.reference is None or not point.good:
            continue
        old, new = point.reference.environment, point.good[0].environment
        # If both contain the variables, a missing variable was not set
        know_variables = isinstance(old.get("variables"), Mapping) and isinstance(new.get("variables"), Mapping)
        found = {
            name: tuple(_NOT_SET if value is None else value for value in pair)
            for name, pair in changed(_flatten(old), _flatten(new)).items()
            if None not in pair or (know_variables and name.startswith("variables."))
        }
        changes = dict(sorted(found.items(), key=lambda item: _RANKS.get(item[0].partition(".")[0], 2))) | changes
    return changes


def _flatten(environment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested facts to dotted names, without nodes, which change from run to run."""
    flat: dict[str, Any] = {}
    for name, value in environment.items():
        if name == "nodes":
            continue
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
