"""Trend of a series of runs: runs at which the level changed, their environment differences, the current level.

Also as sentences. Names are as in the reports: the caller makes them printable.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.documents import json_object
from cloudai_mbridge.gate.history import DEFAULT_METRIC, History, NamedRun, Series, SeriesRun
from cloudai_mbridge.gate.levels import MIN_EFFECT, Levels, find_levels
from cloudai_mbridge.gate.runs import METRICS, SUCCESS, changed
from cloudai_mbridge.gate.verdict import percent
from cloudai_mbridge.metrics import Direction

_MAX_SHOWN = 6
_MAX_DIFFERENCES = 12
_COMMIT_DIGITS = 12
RUN_ID_DIGITS = 10
LAST = 500  # runs of a key in a report


class Effect(StrEnum):
    """Whether a change is for the worse, for the better, or in a metric that should not change at all."""

    WORSE = "worse"
    BETTER = "better"
    CHANGED = "changed"


@dataclass(frozen=True)
class Change:
    """A change of level at `run`, the first run after it, or a departure of the last `num_runs` runs (not a level yet).

    change: relative, positive = larger; interval: of it (95 %), None of a departure. earliest, latest: run ids between
    which the change lies with 95 %. differences: what `run` has otherwise than the run before. back_before: the id of
    the run before which the level was what it is again.
    """

    run: NamedRun
    effect: Effect
    change: float
    before: float
    after: float
    num_runs: int
    interval: tuple[float, float] | None = None
    earliest: str = ""
    latest: str = ""
    differences: tuple[str, ...] = ()
    back_before: str = ""
    is_level: bool = True


@dataclass(frozen=True)
class TrendDrift:
    """A slow change since `run` that no step explains. per_100_runs: relative."""

    run: NamedRun
    effect: Effect
    per_100_runs: float


@dataclass(frozen=True)
class Trend:
    """One metric of one comparability key over its last runs.

    unknown: why nothing can be said, else "". level: what it is now. noise: relative standard deviation of one run.
    changes: in order. notes: excluded or uncertain runs.
    """

    points: tuple[str, ...]
    comparability_id: str
    metric: str
    unit: str
    num_runs: int
    first_ended_at: str
    last_ended_at: str
    unknown: str = ""
    level: float | None = None
    noise: float | None = None
    changes: tuple[Change, ...] = ()
    drift: TrendDrift | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_changed(self) -> bool:
        return bool(self.changes or self.drift)


TRENDS = json_object("Trends", "One metric of several comparability keys.", trends=list[Trend])


def find_trend(
    series: Series, points: Sequence[str] = (), *, min_effect: float = MIN_EFFECT, assumed_noise: float | None = None
) -> Trend:
    """Find the trend of a series. min_effect, assumed_noise: relative, see `find_levels`."""
    measured = [each for each in series.runs if each[2] is not None]
    runs, values = [run for run, _, _ in measured], [value for _, _, value in measured if value is not None]
    levels = find_levels(values, min_effect=min_effect, assumed_noise=assumed_noise)
    metric = METRICS[series.metric]
    drift = None
    if levels.drift is not None:
        start, per_run = levels.drift
        drift = TrendDrift(runs[start], effect_of(per_run * 100, metric.direction), per_run * 100)
    return Trend(
        points=tuple(points) or tuple(sorted({run.point for run, _, _ in series.runs})),
        comparability_id=series.comparability_id,
        metric=series.metric,
        unit=metric.unit,
        num_runs=len(runs),
        first_ended_at=runs[0].ended_at if runs else "",
        last_ended_at=runs[-1].ended_at if runs else "",
        unknown=levels.unknown if runs else f"no good run has {series.metric}",
        level=levels.now,
        noise=levels.noise,
        changes=tuple(_changes(levels, measured, metric.direction)),
        drift=drift,
        notes=tuple(_notes(series, runs, values, levels)),
    )


def effect_of(change: float, direction: Direction) -> Effect:
    """Classify a relative change."""
    if direction is Direction.SAME:
        return Effect.CHANGED
    return Effect.WORSE if (change > 0) == (direction is Direction.LOWER) else Effect.BETTER


def differences(before: SeriesRun, after: SeriesRun) -> tuple[str, ...]:
    """Diff the environments, points and nodes of two runs, one text per difference: name old -> new."""
    (old_run, old_facts, _), (new_run, new_facts, _) = before, after
    facts = changed(_flat(old_facts), _flat(new_facts))
    found = [
        f"{name} {' -> '.join('(unknown)' if value is None else str(value) for value in pair)}"
        for name, pair in sorted(facts.items())
    ]
    if old_run.point != new_run.point:
        found.append(f"point {old_run.point} -> {new_run.point}")
    old, new = set(old_run.nodes), set(new_run.nodes)
    listed = []
    for sign, names in (("+", sorted(new - old)), ("-", sorted(old - new))):
        listed += [f"{sign}{name}" for name in names[:_MAX_SHOWN]]
        listed += [f"and {len(names) - _MAX_SHOWN} more"] if len(names) > _MAX_SHOWN else []
    if listed:
        found.append(f"nodes {' '.join(listed)}")
    return tuple(found)


def _changes(levels: Levels, runs: Sequence[SeriesRun], direction: Direction) -> Iterator[Change]:
    steps = (*levels.steps, *([levels.departure] if levels.departure else ()))
    for step, end in zip(steps, (*levels.starts[2:], len(runs), len(runs)), strict=False):
        is_level = step.interval is not None
        yield Change(
            run=runs[step.index][0],
            effect=effect_of(step.change, direction),
            change=step.change,
            before=step.before,
            after=step.after,
            num_runs=end - step.index,
            interval=step.interval,
            earliest=runs[step.earliest][0].run_id if is_level else "",
            latest=runs[step.latest][0].run_id if is_level else "",
            differences=differences(runs[step.index - 1], runs[step.index]),
            back_before="" if step.back_to is None else runs[step.back_to][0].run_id,
            is_level=is_level,
        )


def _notes(series: Series, runs: Sequence[NamedRun], values: Sequence[float], levels: Levels) -> Iterator[str]:
    if (older := series.num_good - len(series.runs)) > 0:
        yield f"the last {len(series.runs)} runs were looked at, and {older} older ones were not; see --last"
    if series.num_failed:
        yield f"{counted(series.num_failed, 'failed run')} in that time counted for nothing"
    if runs and (missing := len(series.runs) - len(runs)):
        yield f"{missing} of {counted(len(series.runs), 'run')} without a comparable {series.metric} left out"
    if shared := sum(number for number in Counter(run.ended_at for run in runs).values() if number > 1):
        yield f"{shared} runs have identical times; they are in the order of their import"
    if len(runs) > 1 and len(set(values)) == 1:
        yield f"all {len(runs)} runs have the very same value: nothing is known of the noise"
    if not levels.unknown and levels.noise is None:
        yield "the noise is assumed, not measured"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted names, without unknown values."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {} if value is None else {name: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{name}.{key}" if name else str(key))
    return found


def headline(trend: Trend) -> str:
    """Return the name and state of the series."""
    name = f"{' = '.join(trend.points)} [{trend.comparability_id}] {trend.metric}"
    if not trend.num_runs:
        return f"{name}: {trend.unknown}"
    seen = f"{counted(trend.num_runs, 'run')}, {trend.first_ended_at[:10]} to {trend.last_ended_at[:10]}"
    if trend.unknown:
        return f"{name}: {seen}: {trend.unknown}"
    noise = "" if trend.noise is None else f", noise {100 * trend.noise:.2f} %"
    return f"{name}: {_state(trend)}; {seen}, level {_value(trend.level or 0.0, trend.unit)}{noise}"


def story(trend: Trend) -> list[tuple[str, Effect | None]]:
    """Return the events in order, as lines with their effects; None for details of the line above."""
    lines: list[tuple[str, Effect | None]] = []
    for change in trend.changes:
        lines.append((_change_text(change, trend.unit), change.effect))
        lines += [(f"  {line}", None) for line in _about(change)]
    if (drift := trend.drift) is not None:
        text = f"{drift.effect}: drifts by {percent(drift.per_100_runs)} per 100 runs since run {_run_text(drift.run)}"
        lines.append((text, drift.effect))
    lines += [(f"note: {note}", None) for note in trend.notes]
    return lines


def summary(trends: Iterable[Trend]) -> str:
    """Count the series by state."""
    states = Counter("not known" if trend.unknown else _state(trend) for trend in trends)
    return f"{sum(states.values())} series: " + ", ".join(f"{number} {state}" for state, number in states.most_common())


def _state(trend: Trend) -> str:
    if trend.changes and not trend.changes[-1].is_level:
        return "the end departs"
    if trend.drift is not None:
        return "drifting"
    if not trend.changes:
        return "steady"
    return "back at an earlier level" if trend.changes[-1].back_before else "changed"


def _change_text(change: Change, unit: str) -> str:
    values = f"{_value(change.before, unit)} -> {_value(change.after, unit)}"
    runs, back = counted(change.num_runs, "run"), change.back_before[:RUN_ID_DIGITS]
    if not change.is_level:
        which = "the last run departs" if change.num_runs == 1 else f"the last {change.num_runs} runs depart"
        near = f"; near the level of before run {back}" if back else ""
        return (
            f"{change.effect}: {which} from the level by {percent(change.change)} ({runs}: not yet a level):"
            f" {values}, from run {_run_text(change.run)}{near}"
        )
    low, high = change.interval or (change.change, change.change)
    text = (
        f"{change.effect}: {percent(change.change)} ({percent(low)} to {percent(high)}) from run"
        f" {_run_text(change.run)} on, for {runs}: {values}"
    )
    return f"{text}; back at the level of before run {back}" if back else text


def _about(change: Change) -> Iterator[str]:
    run = change.run
    commit = f"commit {run.commit[:_COMMIT_DIGITS]}" if run.commit else "commit unknown"
    nodes = f"nodes {', '.join(run.nodes)}" if run.nodes else "nodes unknown"
    yield f"{run.point}, {commit}, {nodes}"
    if change.differences:
        shown = "; ".join(change.differences[:_MAX_DIFFERENCES])
        more = len(change.differences) - _MAX_DIFFERENCES
        yield f"new against the run before: {shown}" + (f"; and {more} more" if more > 0 else "")
    else:
        yield "its report differs in nothing from that of the run before"
    if change.earliest != change.latest:
        earliest, latest = change.earliest[:RUN_ID_DIGITS], change.latest[:RUN_ID_DIGITS]
        yield f"it may have been anywhere from run {earliest} to run {latest}"


def _run_text(run: NamedRun) -> str:
    return f"{run.run_id[:RUN_ID_DIGITS]} ({run.ended_at[:16].replace('T', ' ')})"


def _value(x: float, unit: str) -> str:
    return f"{x:.5g} {unit}".rstrip()


def history_rows(history: History, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the last good runs of every comparability key of a report, with the changes of their step time.

    A change has the lines that the command prints. report: as in report.json.

    BadInput: the history cannot be read.
    """
    keys = dict.fromkeys(point["comparability"]["id"] for point in report["points"] if point["comparability"])
    rows = []
    for key in keys:
        trend = find_trend(history.series(key, DEFAULT_METRIC, LAST))
        changes = {change.run.run_id: change for change in trend.changes}
        for run in history.runs(comparability_id=key, verdict=SUCCESS, last=LAST):
            change = changes.get(run.run_id)
            rows.append(
                {
                    "run_id": run.run_id,
                    "point": run.point,
                    "comparability_id": run.comparability_id,
                    "ended_at": run.ended_at,
                    "commit": run.commit,
                    "values": {name: values[0] for name, values in run.values.items() if len(values) == 1},
                    "is_change": change is not None,
                    "words": "" if change is None else _change_text(change, trend.unit),
                    "about": [] if change is None else list(_about(change)),
                }
            )
    return rows
