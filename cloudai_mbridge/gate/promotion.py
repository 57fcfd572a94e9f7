"""Promotion checks: objections to runs, regressions against the old baseline, and oddities of an existing baseline.

Promote runs to the baseline of their points: all or none, and a regression only with an explicit option.
"""

import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.gate.baseline import (
    BASELINE_VERSION,
    Baseline,
    BaselineMetric,
    BaselinePoint,
    BaselineRun,
    Bounds,
    Value,
    as_list,
    load_baseline,
    noise_between,
    read_bytes,
    render_baseline,
    summarize_environments,
    summarize_metric,
    value_to_toml,
)
from cloudai_mbridge.gate.policy import MetricPolicy, default_metrics, matches
from cloudai_mbridge.gate.runs import METRICS, OF_FLOPS, Originals, RunResult, Values, changed, name_changes, why_not
from cloudai_mbridge.metrics import PRIMARY, Direction
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
    values = [run.values for run in runs]
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


@dataclass(frozen=True)
class Terms:
    """Author, time (UTC, ISO 8601), reason and accepted exceptions of a promotion.

    accept_regression: worse than the baseline that is there. accept_change: other work under the same name.
    """

    by: str
    at: str
    reason: str
    limits: Limits = field(default_factory=Limits)
    metrics: Sequence[MetricPolicy] = field(default_factory=default_metrics)
    accept_regression: bool = False
    accept_change: bool = False


@dataclass(frozen=True)
class Proposal:
    """A promotion before it is written. old: the file as it was read, None without one. refusals: point -> why."""

    path: Path
    old: bytes | None
    new: bytes
    points: tuple[str, ...]
    refusals: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]


def select(results: Sequence[RunResult], globs: Sequence[str]) -> dict[str, list[RunResult]]:
    """Return the runs of each point whose name matches a pattern, or of all points without patterns.

    BadInput: no runs, or a pattern without a match.
    """
    points: dict[str, list[RunResult]] = {}
    for run in results:
        points.setdefault(run.point, []).append(run)
    if not points:
        raise BadInput("the results hold no run; give reports of runs that were not rejected")
    for glob in globs:
        if not any(matches(glob, point) for point in points):
            raise BadInput(f"--point {glob!r}: matches no point; there are {', '.join(map(repr, points))}")
    return {point: runs for point, runs in points.items() if not globs or any(matches(glob, point) for glob in globs)}


def propose(path: Path, points: Mapping[str, Sequence[RunResult]], terms: Terms) -> Proposal:
    """Merge the points into the existing baseline. With a refusal nothing may be written.

    BadInput: the existing baseline cannot be read.
    """
    old = read_bytes(path)
    baseline = Baseline(version=BASELINE_VERSION) if old is None else load_baseline(path)
    refusals, notes, promoted = {}, [], {point.point: point for point in baseline.points}
    for name, runs in points.items():
        reasons = objections(runs, terms.limits)
        if not reasons:
            point, own_notes = _build(runs, terms)
            notes += [f"{name}: {note}" for note in own_notes]
            found = [each for each in baseline.points if each.comparability_id == point.comparability_id]
            # Prefer the point of this name
            same_work = min(found, key=lambda each: each.point != name, default=None)
            point, reasons = _in_place_of(baseline.point(name), same_work, point, terms)
            promoted[name] = point
            if same_work is not None and same_work.point not in points:
                promoted.pop(same_work.point, None)
        if reasons:
            refusals[name] = reasons
    text = render_baseline(Baseline(version=BASELINE_VERSION, points=list(promoted.values())))
    return Proposal(path, old, text.encode(), tuple(points), refusals, (*lowered(terms.limits), *notes))


def _build(runs: Sequence[RunResult], terms: Terms) -> tuple[BaselinePoint, list[str]]:
    """Build a point from its runs, with notes for the promoter."""
    environment, notes = summarize_environments([run.environment for run in runs])
    first, kept = runs[0], [_run(run) for run in runs]
    names = [name for name in METRICS if name in kept[0].values]
    limits = {metric.name: metric for metric in terms.metrics}
    metrics = [_metric(name, [run.values[name] for run in kept], limits.get(name)) for name in names]
    comparability = {name: value_to_toml(value) for name, value in first.comparability.items()}  # as in a file
    try:
        point = BaselinePoint(
            point=first.point,
            comparability_id=first.comparability_id,
            flops_formula=first.flops_formula,
            flops_per_step=first.flops_per_step,
            promoted_by=terms.by,
            promoted_at=terms.at,
            reason=terms.reason,
            metrics=metrics,
            runs=kept,
            comparability=comparability,
            environment=environment,
        )
    except ValidationError as error:
        mistake = error.errors()[0]
        where = ".".join(map(str, mistake["loc"]))
        raise BadInput(
            f"{first.point!a}: {where}: {mistake['msg']}; no baseline can hold what its report says"
        ) from None
    if len({run.nodes for run in runs}) == 1:
        notes.append("all runs are of the same nodes, so the noise between nodes is not in it")
    if within_a_day([run.ended_at for run in runs]):
        notes.append("all runs ended within a day, so the noise between days is not in it")
    return point, notes


def _in_place_of(
    old: BaselinePoint | None, same_work: BaselinePoint | None, new: BaselinePoint, terms: Terms
) -> tuple[BaselinePoint, list[str]]:
    """Return the new point with the anchors of the baseline point of the same work, and the refusals.

    old: the baseline point of the same name.
    """
    changes, worse, point = [], dict[str, str](), new
    if old is not None and old.comparability_id != new.comparability_id:
        differing = name_changes(changed(old.comparability, new.comparability))
        changes.append(f"is different work from the baseline's: {differing}")
    if same_work is not None:
        worse = regressions(same_work, new, terms.metrics)
        point = with_anchors(same_work, new, worse)
        if same_work.point != new.point:
            changes.append(f"is the work of the baseline's {same_work.point!r} under another name")
    refused = [] if terms.accept_change else [f"{text}; --accept-change puts it there instead" for text in changes]
    if not terms.accept_regression:
        refused += [f"{text}; --accept-regression allows it" for text in worse.values()]
    return point.model_copy(update={"accepted": [*changes, *worse.values()]}), refused


def _run(run: RunResult) -> BaselineRun:
    values = {name: list(v) if len(v) > 1 else v[0] for name, v in run.values.items()}
    return BaselineRun(run_id=run.run_id, ended_at=run.ended_at, nodes=list(run.nodes), values=values)


def _metric(name: str, values: Sequence[Value], policy: MetricPolicy | None) -> BaselineMetric:
    value, noise = summarize_metric(values)
    return BaselineMetric(
        name=name,
        unit=METRICS[name].unit,
        direction=METRICS[name].direction,
        value=value,
        noise=noise,
        n=len(values),
        bounds=Bounds(lower=-policy.tolerance, upper=policy.tolerance) if policy else None,
        anchor=value,
    )


def difference(proposal: Proposal) -> list[str]:
    """Return the lines of the file's unified diff; if nothing changes, a single line with that message."""
    old = (proposal.old or b"").decode(errors="replace")
    before = str(proposal.path) if proposal.old is not None else "/dev/null"
    pair = _lines(old), _lines(proposal.new.decode())
    lines = list(difflib.unified_diff(*pair, before, str(proposal.path), lineterm=""))
    return lines or [f"{proposal.path}: would not change"]


def _lines(text: str) -> list[str]:
    """Split at line feeds only, as TOML does; Python would split at more characters."""
    return text.removesuffix("\n").split("\n") if text else []
