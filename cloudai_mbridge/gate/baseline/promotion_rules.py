"""Promotion checks: objections to runs, regressions against the old baseline, and oddities of an existing baseline."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import itemgetter

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.baseline.model import Baseline, BaselineMetric, BaselinePoint, Value, as_list
from cloudai_mbridge.gate.baseline.read import noise_between
from cloudai_mbridge.gate.compare.groups import Originals, changed, name_changes, why_not
from cloudai_mbridge.gate.compare.policy import MetricPolicy, default_metrics
from cloudai_mbridge.gate.compare.reference import Values, run_values
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS, OF_FLOPS, PRIMARY, Direction
from cloudai_mbridge.report.model import comparability_id

_SHOWN = 4

Runs = Sequence[RunResult]


@dataclass(frozen=True)
class Limits:
    """min_runs: per point. max_noise: relative standard deviation of the step time between runs."""

    min_runs: int = 5
    max_noise: float = 0.02


def objections(runs: Runs, limits: Limits) -> list[str]:
    """Return the reasons not to promote the runs of one point; values are checked only if all else passes."""
    return list(_of_runs(runs, limits)) or list(_of_values(runs, limits))


def lowered(limits: Limits) -> Iterator[str]:
    """Yield a note on every limit laxer than the default."""
    rule = Limits()
    if limits.min_runs < rule.min_runs:
        yield f"--min-runs {limits.min_runs}: the rule is {rule.min_runs}; with fewer, the noise is hardly known"
    if limits.max_noise > rule.max_noise:
        yield f"--max-noise {limits.max_noise:g}: the rule is {rule.max_noise:g}; with more, less is detected"


def within_a_day(ends: Sequence[str]) -> bool:
    """Return whether runs ended within 24 hours; False if a time is invalid."""
    try:
        times = [datetime.fromisoformat(end) for end in ends]
    except ValueError:
        return False
    times = [time.replace(tzinfo=UTC) if time.tzinfo is None else time for time in times]
    return max(times) - min(times) <= timedelta(days=1)


def _of_runs(runs: Runs, limits: Limits) -> Iterator[str]:
    yield from (f"{name_of(run)} is not a good run: {why}" for run in runs if (why := why_not(run)))
    for run in runs:
        if run.flops_per_step is not None and not 0 < run.flops_per_step < math.inf:
            yield f"{name_of(run)} counts {run.flops_per_step} FLOPs per step"
    yield from _given_twice(runs)
    if len(runs) < limits.min_runs:
        yield f"it has {len(runs)} of the {limits.min_runs} runs that are needed to know how they differ"
    if different := _not_alike(runs):
        yield different


def name_of(run: RunResult) -> str:
    """Return a description that locates a run."""
    return f"run {run.iteration} of {run.source}"


def _given_twice(runs: Runs) -> Iterator[str]:
    originals = Originals()
    ids: dict[str, RunResult] = {}
    times: dict[tuple[float | None, ...], RunResult] = {}
    for run in runs:
        measured = tuple(step.step_time_s for step in run.steps)
        if run.run_id in ids:
            yield f"{name_of(run)} is the same as {name_of(ids[run.run_id])}; give each run once"
        elif measured in times and any(time is not None for time in measured):
            yield f"{name_of(run)} has the same step times as {name_of(times[measured])}: a copy, or rounded"
        elif (copied := originals.of(run)) is not None:
            yield f"{name_of(run)} has the step times of {name_of(copied)} to a millionth: a copy"
        ids.setdefault(run.run_id, run)
        originals.add(run)
        times.setdefault(measured, run)


def _not_alike(runs: Runs) -> str:
    """Return the difference that makes runs incomparable, "" without any."""
    first = runs[0]
    if any(not run.comparability_id for run in runs):
        return "its comparability fields are missing; write the report again with this mbridge"
    if any(comparability_id(run.comparability) != run.comparability_id for run in runs):
        return "its comparability id is not the digest of its fields; write the report again with this mbridge"
    for run in runs[1:]:
        if run.comparability_id != first.comparability_id:
            changes = name_changes(changed(first.comparability, run.comparability))
            return f"{name_of(run)} is of another kind than {name_of(first)}: {changes}"
        if (run.flops_formula, run.flops_per_step) != (first.flops_formula, first.flops_per_step):
            return (
                f"{name_of(run)} counts {run.flops_per_step} FLOPs by {run.flops_formula!r},"
                f" {name_of(first)} {first.flops_per_step} by {first.flops_formula!r}"
            )
    return ""


def _of_values(runs: Runs, limits: Limits) -> Iterator[str]:
    values = [run_values(run).values for run in runs]
    yield from _partly_measured(runs, values)
    for name in METRICS:
        if not all(math.isfinite(number) and number > 0 for value in values for number in value.get(name, ())):
            yield f"{name} is not a finite number above zero, so it has no relative changes"
    for name, metric in METRICS.items():
        found = {value[name] for value in values if name in value}
        if not metric.noise_floor and len(values) > 1 and len(found) == 1:
            yield f"{name} is {found.pop()[0]!r} to the last digit in every run, as copied or rounded numbers are"
    times = [value[PRIMARY][0] for value in values if PRIMARY in value and value[PRIMARY][0] > 0]
    noise = noise_between(times) if times else None
    if noise is not None and noise > limits.max_noise:
        yield (
            f"{PRIMARY} varies by {noise:.1%} between runs ({min(times):.4g} to {max(times):.4g} s), more than"
            f" {limits.max_noise:.1%}: with it, small regressions cannot be seen"
        )


def _partly_measured(runs: Runs, values: Sequence[Mapping[str, Values]]) -> Iterator[str]:
    for name in METRICS:
        having = [value[name] for value in values if name in value]
        if not having and name == PRIMARY:
            yield f"no run has measured {name}"
        if 0 < len(having) < len(runs):
            without = [name_of(run) for run, value in zip(runs, values, strict=True) if name not in value]
            yield f"{len(without)} of {len(runs)} runs have not measured {name}: {', '.join(without[:_SHOWN])}"
        if len(set(map(len, having))) > 1:
            yield f"{name} has another number of values in one run than in another"


def regressions(old: BaselinePoint, new: BaselinePoint, limits: Sequence[MetricPolicy]) -> dict[str, str]:
    """Return metric -> regression, for the same work: a change beyond the margin is enough, significant or not.

    A series of promotions, each within the margin, could move a baseline far away, so none may be beyond the tolerance
    from the anchor either. Limits default to the built-in limits. Metrics without a limit, or that follow another
    metric, are skipped: they are the same measurement in other units.
    """
    gone = [metric.name for metric in old.metrics if new.metric(metric.name) is None]
    found = {name: f"{name} was measured, and is not any more" for name in gone}
    by_name = {limit.name: limit for limit in (*default_metrics(), *limits)}
    for before in old.metrics:
        limit, after = by_name.get(before.name), new.metric(before.name)
        if limit is None or limit.follows or after is None or _counts_otherwise(before.name, old, new):
            continue
        if text := _worse(before, after, limit):
            found[before.name] = text
    return found


def _counts_otherwise(metric: str, old: BaselinePoint, new: BaselinePoint) -> bool:
    """Return whether a metric is based on FLOPs counted by another formula."""
    return metric == OF_FLOPS and (old.flops_formula, old.flops_per_step) != (new.flops_formula, new.flops_per_step)


def with_anchors(old: BaselinePoint, new: BaselinePoint, accepted: Collection[str]) -> BaselinePoint:
    """Return the new point with the old point's anchors, except for accepted metrics."""
    metrics = [
        metric
        if metric.name in accepted or _counts_otherwise(metric.name, old, new)
        else _anchored(old.metric(metric.name), metric)
        for metric in new.metrics
    ]
    return new.model_copy(update={"metrics": metrics})


def _worse(before: BaselineMetric, after: BaselineMetric, limit: MetricPolicy) -> str:
    """Return the regression, "" without one."""
    num_before, num_after = len(as_list(before.value)), len(as_list(after.value))
    if num_before != num_after:
        return f"{limit.name} has {num_after} values, {num_before} before"
    anchor = before.anchor or before.value
    step, drift = (_change(value, after.value, after.direction) for value in (before.value, anchor))
    if abs(step) > limit.margin:
        return f"{limit.name} is worse by {step:+.2%} than the baseline, beyond the margin of {limit.margin:.2%}"
    if abs(drift) > limit.tolerance:
        return (
            f"{limit.name} has drifted by {drift:+.2%} from the best baseline since a regression was accepted,"
            f" beyond the tolerance of {limit.tolerance:.2%}"
        )
    return ""


def _change(before: Value, after: Value, direction: Direction) -> float:
    """Return the largest relative change for the worse, 0 without one."""
    changes = [b / a - 1 for a, b in zip(as_list(before), as_list(after), strict=True)]
    worse = (change for change in changes if any(sign * change > 0 for sign in direction.worse))
    return max(worse, key=abs, default=0.0)


def _anchored(before: BaselineMetric | None, after: BaselineMetric) -> BaselineMetric:
    if before is None or len(as_list(before.value)) != len(as_list(after.value)):
        return after
    pairs = zip(as_list(before.anchor or before.value), as_list(after.value), strict=True)
    best_of = {Direction.LOWER: min, Direction.HIGHER: max}.get(after.direction, itemgetter(0))
    best = [best_of(pair) for pair in pairs]
    return after.model_copy(update={"anchor": best if isinstance(after.value, list) else best[0]})


def oddities(baseline: Baseline, now: datetime, max_age_days: int) -> list[str]:
    """Return a line for every oddity in a valid baseline. `now` has a time zone."""
    if baseline.none_until is not None:
        return [
            f"none has been promoted yet, and one must be by {baseline.none_until}; a gate's exit code is 17 until then"
        ]
    if not baseline.points:
        return ["it has no points, so a gate has nothing to compare with"]
    return [f"{point.point}: {text}" for point in baseline.points for text in _of_point(point, now, max_age_days)]


def _of_point(point: BaselinePoint, now: datetime, max_age_days: int) -> Iterator[str]:
    limits = Limits()
    age = (now - datetime.fromisoformat(point.promoted_at)).days
    if age > max_age_days:
        yield f"was promoted {age} days ago, on {point.promoted_at[:10]}"
    if age < 0:
        yield f"was promoted in the future, at {point.promoted_at}"
    if len(point.runs) < limits.min_runs:
        yield f"has {counted(len(point.runs), 'run')}, {limits.min_runs} are the rule"
    primary = point.metric(PRIMARY)
    if primary is None:
        yield f"has no {PRIMARY}"
    elif primary.noise is not None and primary.noise > limits.max_noise:
        yield f"{PRIMARY} varies by {primary.noise:.1%} between runs, {limits.max_noise:.1%} is the rule"
    if len({tuple(run.nodes) for run in point.runs}) == 1:
        yield "all its runs are of the same nodes, so the noise between nodes is not in it"
    if len(point.runs) > 1 and within_a_day([run.ended_at for run in point.runs]):
        yield "all its runs ended within a day, so the noise between days is not in it"
    yield from _odd_bounds(point)
    yield from (f"was promoted although {text}" for text in point.accepted)


def _odd_bounds(point: BaselinePoint) -> Iterator[str]:
    built_in = {metric.name: metric for metric in default_metrics()}
    for name, bounds in ((metric.name, metric.bounds) for metric in point.metrics):
        tolerance = built_in.get(name, MetricPolicy(name=name)).tolerance
        if bounds is not None and (bounds.lower, bounds.upper) != (-tolerance, tolerance):
            text = f"{bounds.lower:+.1%} to {bounds.upper:+.1%}"
            yield f"{name} has the bounds {text}, the built-in tolerance is {tolerance:.1%}"
