"""Promote runs to the baseline of their points: all or none, and a regression only with an explicit option.

Also oddities of an existing baseline.
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
    summarize_metric,
    value_to_toml,
)
from cloudai_mbridge.gate.environment import summarize_environments
from cloudai_mbridge.gate.policy import MetricPolicy, default_metrics, matches
from cloudai_mbridge.gate.runs import METRICS, OF_FLOPS, Originals, RunResult, changed, name_changes, why_not
from cloudai_mbridge.metrics import PRIMARY, Direction
from cloudai_mbridge.report.model import comparability_id

MIN_RUNS, MAX_NOISE = 5, 0.02
_SHOWN = 4


@dataclass(frozen=True)
class Terms:
    """Author, time (UTC, ISO 8601), reason and accepted exceptions of a promotion.

    min_runs: per point. max_noise: relative standard deviation of the step time between runs.
    accept_regression: worse than the baseline that is there. accept_change: other work under the same name.
    """

    by: str
    at: str
    reason: str
    min_runs: int = MIN_RUNS
    max_noise: float = MAX_NOISE
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
    if terms.min_runs < MIN_RUNS:
        notes.append(f"--min-runs {terms.min_runs}: the rule is {MIN_RUNS}; with fewer, the noise is hardly known")
    if terms.max_noise > MAX_NOISE:
        notes.append(f"--max-noise {terms.max_noise:g}: the rule is {MAX_NOISE:g}; with more, less is detected")
    for name, runs in points.items():
        # Values are checked only if all else passes
        reasons = list(_objections_to_runs(runs, terms.min_runs)) or list(_objections_to_values(runs, terms.max_noise))
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
    return Proposal(path, old, text.encode(), tuple(points), refusals, tuple(notes))


def difference(proposal: Proposal) -> list[str]:
    """Return the lines of the file's unified diff; if nothing changes, a single line with that message."""
    texts = (proposal.old or b"").decode(errors="replace"), proposal.new.decode()
    # At line feeds only, as TOML does; Python would split at more characters
    old, new = (text.removesuffix("\n").split("\n") if text else [] for text in texts)
    before = str(proposal.path) if proposal.old is not None else "/dev/null"
    lines = list(difflib.unified_diff(old, new, before, str(proposal.path), lineterm=""))
    return lines or [f"{proposal.path}: would not change"]


def _objections_to_runs(runs: Sequence[RunResult], min_runs: int) -> Iterator[str]:
    names = [f"run {run.iteration} of {run.source}" for run in runs]
    for run, name in zip(runs, names, strict=True):
        if why := why_not(run):
            yield f"{name} is not a good run: {why}"
    for run, name in zip(runs, names, strict=True):
        if run.flops_per_step is not None and not 0 < run.flops_per_step < math.inf:
            yield f"{name} counts {run.flops_per_step} FLOPs per step"
    originals, times = Originals(), dict[tuple[float | None, ...], str]()
    for run, name in zip(runs, names, strict=True):
        measured = tuple(step.step_time_s for step in run.steps)
        copied = originals.of(run)
        other = f"run {copied.iteration} of {copied.source}" if copied else ""
        if copied and copied.run_id == run.run_id:
            yield f"{name} is the same as {other}; give each run once"
        elif measured in times and any(time is not None for time in measured):
            yield f"{name} has the same step times as {times[measured]}: a copy, or rounded"
        elif copied:
            yield f"{name} has the step times of {other} to a millionth: a copy"
        originals.add(run)
        times.setdefault(measured, name)
    if len(runs) < min_runs:
        yield f"it has {len(runs)} of the {min_runs} runs that are needed to know how they differ"
    if any(not run.comparability_id for run in runs):
        yield "its comparability fields are missing; write the report again with this mbridge"
        return
    if any(comparability_id(run.comparability) != run.comparability_id for run in runs):
        yield "its comparability id is not the digest of its fields; write the report again with this mbridge"
        return
    first = runs[0]
    for run, name in zip(runs, names, strict=True):
        if run.comparability_id != first.comparability_id:
            changes = name_changes(changed(first.comparability, run.comparability))
            yield f"{name} is of another kind than {names[0]}: {changes}"
            return
        if (run.flops_formula, run.flops_per_step) != (first.flops_formula, first.flops_per_step):
            yield (
                f"{name} counts {run.flops_per_step} FLOPs by {run.flops_formula!r},"
                f" {names[0]} {first.flops_per_step} by {first.flops_formula!r}"
            )
            return


def _objections_to_values(runs: Sequence[RunResult], max_noise: float) -> Iterator[str]:
    for name in METRICS:
        having = [run.values[name] for run in runs if name in run.values]
        if not having and name == PRIMARY:
            yield f"no run has measured {name}"
        if 0 < len(having) < len(runs):
            without = [f"run {run.iteration} of {run.source}" for run in runs if name not in run.values]
            yield f"{len(without)} of {len(runs)} runs have not measured {name}: {', '.join(without[:_SHOWN])}"
        if len(set(map(len, having))) > 1:
            yield f"{name} has another number of values in one run than in another"
    for name in METRICS:
        if not all(math.isfinite(number) and number > 0 for run in runs for number in run.values.get(name, ())):
            yield f"{name} is not a finite number above zero, so it has no relative changes"
    for name, metric in METRICS.items():
        found = {run.values[name] for run in runs if name in run.values}
        if not metric.noise_floor and len(runs) > 1 and len(found) == 1:
            yield f"{name} is {found.pop()[0]!r} to the last digit in every run, as copied or rounded numbers are"
    times = [run.values[PRIMARY][0] for run in runs if PRIMARY in run.values and run.values[PRIMARY][0] > 0]
    noise = noise_between(times) if times else None
    if noise is not None and noise > max_noise:
        yield (
            f"{PRIMARY} varies by {noise:.1%} between runs ({min(times):.4g} to {max(times):.4g} s), more than"
            f" {max_noise:.1%}: with it, small regressions cannot be seen"
        )


def _build(runs: Sequence[RunResult], terms: Terms) -> tuple[BaselinePoint, list[str]]:
    """Build a point from its runs, with notes for the promoter."""
    environment, notes = summarize_environments([run.environment for run in runs])
    first, limits = runs[0], {metric.name: metric for metric in terms.metrics}
    kept = [
        BaselineRun(
            run_id=run.run_id,
            ended_at=run.ended_at,
            nodes=list(run.nodes),
            values={name: list(v) if len(v) > 1 else v[0] for name, v in run.values.items()},
        )
        for run in runs
    ]
    metrics = []
    for name in (name for name in METRICS if name in kept[0].values):
        value, noise = summarize_metric([run.values[name] for run in kept])
        metrics.append(
            BaselineMetric(
                name=name,
                unit=METRICS[name].unit,
                direction=METRICS[name].direction,
                value=value,
                noise=noise,
                n=len(kept),
                bounds=Bounds(lower=-limit.tolerance, upper=limit.tolerance) if (limit := limits.get(name)) else None,
                anchor=value,
            )
        )
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
            comparability={name: value_to_toml(value) for name, value in first.comparability.items()},  # as in a file
            environment=environment,
        )
    except ValidationError as error:
        mistake = error.errors()[0]
        where = ".".join(map(str, mistake["loc"]))
        raise BadInput(
            f"{first.point!a}: {where}: {mistake['msg']}; no baseline can contain this value of its report"
        ) from None
    if len({run.nodes for run in runs}) == 1:
        notes.append("all runs are of the same nodes, so the noise between nodes is not in it")
    if _within_a_day([run.ended_at for run in runs]):
        notes.append("all runs ended within a day, so the noise between days is not in it")
    return point, notes


def _within_a_day(ends: Sequence[str]) -> bool:
    """Return whether runs ended within 24 hours; False if a time is invalid."""
    try:
        times = [datetime.fromisoformat(end) for end in ends]
    except ValueError:
        return False
    times = [time.replace(tzinfo=UTC) if time.tzinfo is None else time for time in times]
    return max(times) - min(times) <= timedelta(days=1)


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
        worse = _regressions(same_work, new, terms.metrics)
        point = _with_anchors(same_work, new, worse)
        if same_work.point != new.point:
            changes.append(f"is the work of the baseline's {same_work.point!r} under another name")
    refused = [] if terms.accept_change else [f"{text}; --accept-change puts it there instead" for text in changes]
    if not terms.accept_regression:
        refused += [f"{text}; --accept-regression allows it" for text in worse.values()]
    return point.model_copy(update={"accepted": [*changes, *worse.values()]}), refused


def _regressions(old: BaselinePoint, new: BaselinePoint, limits: Sequence[MetricPolicy]) -> dict[str, str]:
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


def _with_anchors(old: BaselinePoint, new: BaselinePoint, accepted: Collection[str]) -> BaselinePoint:
    """Return the new point with the old point's anchors, except for accepted metrics."""
    metrics = []
    for after in new.metrics:
        before = old.metric(after.name)
        is_same = after.name not in accepted and not _counts_otherwise(after.name, old, new)
        if is_same and before is not None and len(as_list(before.value)) == len(as_list(after.value)):
            pairs = zip(as_list(before.anchor or before.value), as_list(after.value), strict=True)
            best_of = {Direction.LOWER: min, Direction.HIGHER: max}.get(after.direction, itemgetter(0))
            best = [best_of(pair) for pair in pairs]
            after = after.model_copy(update={"anchor": best if isinstance(after.value, list) else best[0]})
        metrics.append(after)
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
    age = (now - datetime.fromisoformat(point.promoted_at)).days
    if age > max_age_days:
        yield f"was promoted {age} days ago, on {point.promoted_at[:10]}"
    if age < 0:
        yield f"was promoted in the future, at {point.promoted_at}"
    if len(point.runs) < MIN_RUNS:
        yield f"has {counted(len(point.runs), 'run')}, {MIN_RUNS} are the rule"
    primary = point.metric(PRIMARY)
    if primary is None:
        yield f"has no {PRIMARY}"
    elif primary.noise is not None and primary.noise > MAX_NOISE:
        yield f"{PRIMARY} varies by {primary.noise:.1%} between runs, {MAX_NOISE:.1%} is the rule"
    if len({tuple(run.nodes) for run in point.runs}) == 1:
        yield "all its runs are of the same nodes, so the noise between nodes is not in it"
    if len(point.runs) > 1 and _within_a_day([run.ended_at for run in point.runs]):
        yield "all its runs ended within a day, so the noise between days is not in it"
    built_in = {metric.name: metric for metric in default_metrics()}
    for name, bounds in ((metric.name, metric.bounds) for metric in point.metrics):
        tolerance = built_in.get(name, MetricPolicy(name=name)).tolerance
        if bounds is not None and (bounds.lower, bounds.upper) != (-tolerance, tolerance):
            text = f"{bounds.lower:+.1%} to {bounds.upper:+.1%}"
            yield f"{name} has the bounds {text}, the built-in tolerance is {tolerance:.1%}"
    yield from (f"was promoted although {text}" for text in point.accepted)
