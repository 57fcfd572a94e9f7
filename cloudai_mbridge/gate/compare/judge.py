"""The gate: judge results against references under a policy, per metric, per point and overall.

A regression is larger than the metric's margin, and significant after a correction for all tests of this gate. A pass
is shown to be smaller than the tolerance. Anything else is inconclusive, and never a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from statistics import fmean, geometric_mean
from types import MappingProxyType
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.compare import words
from cloudai_mbridge.gate.compare.groups import Match, changed, group_by_point, match
from cloudai_mbridge.gate.compare.metric import Tested, draft_metric, noise_of, settle
from cloudai_mbridge.gate.compare.policy import GatePolicy, MetricPolicy, expired, waiver_for
from cloudai_mbridge.gate.compare.reference import ReferencePoint, run_values
from cloudai_mbridge.gate.compare.shared import (
    Suites,
    compare_suites,
    draft_shared,
    metrics_that_are_worse,
    node_notes,
    settle_shared,
    slow_nodes,
)
from cloudai_mbridge.gate.compare.verdict import GateResult, GateVerdict, MetricVerdict, PointVerdict, worst
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS
from cloudai_mbridge.gate.statistics.comparison import adjust

# Decimals in Megatron-Bridge's lines; times from its iteration lines have two more
_DIGITS_OF_TIME, _FINER_DIGITS_OF_TIME, _DIGITS_OF_RATE = 2, 4, 1

_NOT_SET = "(not set)"
_FIRST = ("variables", "benchmark")


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
    matches = match(references, points, where, left_out)
    suites = compare_suites(matches, policy)
    drafts = [_draft(found, policy, suites) for found in matches]
    rate = policy.false_alarm_rate / num_judgements
    tested = [metric for draft in drafts for metric in draft.values() if isinstance(metric, Tested)]
    together = draft_shared(suites, policy.metrics, tested)
    everything = [*tested, *(test.tested for test in together)]
    _correct(everything)
    shared = settle_shared(together, suites, policy, rate, today)
    are_worse = metrics_that_are_worse(shared)
    terms = rate, sum(metric.policy.weight for metric in everything), are_worse
    verdicts = tuple(_settle(*point, policy, terms, today) for point in zip(matches, drafts, strict=True))
    nodes = slow_nodes(suites)
    notes += node_notes(nodes)
    if num_judgements > 1:
        notes.append(f"{num_judgements} judgements were asked for: each has a false-alarm rate of {rate:.2%}")
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
        environment_changes=_environment_changes(matches),
        improvement_fails=policy.fail_on_improvement,
        shared=shared,
        slow_nodes=nodes,
    )


def _draft(found: Match, policy: GatePolicy, suites: Suites) -> dict[str, Tested | MetricVerdict]:
    """Return the metrics of a point before the correction: comparisons, or verdicts if not comparable."""
    if found.why or found.runs is None or found.reference is None or not found.runs.good:
        return {}
    runs = [run_values(run) for run in found.runs.good]
    drafts = {
        m.name: draft_metric(m, found.reference, found.runs, runs, policy, suites.comparison(found.point, m.name))
        for m in policy.metrics
    }
    return {name: draft for name, draft in drafts.items() if draft is not None}


def _correct(tested: Sequence[Tested]) -> None:
    """Adjust all p-values of a gate together, separately for changes for the worse and for the better."""
    weights = [metric.policy.weight for metric in tested]
    worse = adjust([metric.p_worse for metric in tested], weights)
    better = adjust([metric.p_better for metric in tested], weights)
    for i, metric in enumerate(tested):
        metric.adjusted_worse, metric.adjusted_better = worse[i], better[i]


def _settle(
    found: Match,
    draft: Mapping[str, Tested | MetricVerdict],
    policy: GatePolicy,
    terms: tuple[float, float, Mapping[str, bool]],
    today: date,
) -> PointVerdict:
    good = found.runs.good if found.runs else ()
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
        if metric.follows in by_name and metric.name not in by_name and _is_measured(metric.name, found):
            by_name[metric.name] = _follow(metric, by_name[metric.follows], found)
    metrics = tuple(_waive(by_name[m.name], found.point, policy, today) for m in policy.metrics if m.name in by_name)
    deciding = [m.verdict for m in metrics if m.decides and not m.waived]
    passes = [GateVerdict.PASS] if metrics else []
    is_tested = any(isinstance(m, Tested) for m in draft.values()) and GateVerdict.NOT_RUN not in deciding
    slow = words.slow_runs(good, policy) if is_tested else ()
    return PointVerdict(
        point=found.point,
        verdict=worst([*own, *deciding, *passes]),
        words=(*texts, *slow),
        metrics=metrics,
        runs=tuple(run.run_id for run in good),
        nodes=tuple(sorted({node for run in good for node in run.nodes})),
    )


def _point_verdicts(found: Match, policy: GatePolicy) -> tuple[list[GateVerdict], list[str]]:
    """Return the point-level failures, as verdicts and texts."""
    if found.runs is None:
        return [GateVerdict.NOT_RUN], [found.why or "the reference has this point, but the result has no run of it"]
    verdicts, texts = [], []
    failed = found.runs.failed
    if len(failed) > policy.max_failed_runs or not found.runs.good:
        verdicts.append(GateVerdict.NOT_RUN)
        good, total = len(found.runs.good), len(failed) + len(found.runs.good)
        needed = max(1, total - policy.max_failed_runs)
        why = words.reasons(why for _, why in failed)
        texts.append(
            f"{good} of {counted(total, 'run')} {'was' if total == 1 else 'were'} good;"
            f" {needed} {'is' if needed == 1 else 'are'} needed: {why}"
        )
    if found.why:
        verdicts.append(GateVerdict.NOT_COMPARABLE)
        texts.append(found.why)
    return verdicts, texts


def _is_measured(name: str, found: Match) -> bool:
    """Return whether a run on either side has the metric."""
    reference, runs = (found.reference.runs, found.runs.good) if found.reference and found.runs else ((), ())
    return any(name in run.values for run in reference) or any(METRICS[name].of(run) for run in runs)


def _follow(metric: MetricPolicy, leader: MetricVerdict, found: Match) -> MetricVerdict:
    """Report a metric that another metric decides: TFLOP/s are the step time in other units."""
    reference, runs = (found.reference.runs, found.runs.good) if found.reference and found.runs else ((), ())
    sides = {
        name: (
            [run.values[name][0] for run in reference if name in run.values],
            [value[0] for run in runs if (value := METRICS[name].of(run))],
        )
        for name in (leader.metric, metric.name)
    }
    old, new = sides[metric.name]
    before, after = (fmean(values) if values else None for values in (old, new))
    # The values of the runs: the leader's verdict may exclude the effects of slow nodes, which the rates contain
    times, rates = (
        [geometric_mean(values) for values in sides[name] if values] for name in (leader.metric, metric.name)
    )
    is_known = leader.baseline is not None
    is_rounded = any(map(_is_rounded, runs))
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
    if not len(times) == len(rates) == 2:
        return ""
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


def _environment_changes(matches: Sequence[Match]) -> Mapping[str, Any]:
    """Return the differences between the environments of the compared runs."""
    changes: dict[str, Any] = {}
    for found in matches:
        if found.reference is not None and found.runs is not None and found.runs.good:
            changes = _new_facts(found.reference.environment, found.runs.good[0].environment) | changes
    return changes


def _new_facts(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences between facts present in both, the likeliest causes first: the terminal shows a few.

    If both contain the variables, a missing variable was not set.
    """
    know_variables = isinstance(old.get("variables"), Mapping) and isinstance(new.get("variables"), Mapping)
    differing = changed(flatten(old), flatten(new))
    return {
        name: tuple(_NOT_SET if value is None else value for value in pair)
        for name, pair in sorted(differing.items(), key=lambda item: _rank(item[0]))
        if None not in pair or (know_variables and name.startswith("variables."))
    }


def _rank(fact: str) -> int:
    """Return the rank of a fact: the author's settings, the benchmark's commit, others."""
    table = fact.partition(".")[0]
    return _FIRST.index(table) if table in _FIRST else len(_FIRST)


def flatten(environment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested facts to dotted names, without nodes, which change from run to run."""
    flat: dict[str, Any] = {}
    for name, value in environment.items():
        if name == "nodes":
            continue
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
