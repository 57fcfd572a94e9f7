"""Trend of a series of runs: runs at which the level changed, their environment differences, current level.

A trend as human-readable sentences. Names are as in the reports: the caller makes them printable.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.history import DEFAULT_METRIC, History, Series, SeriesRun
from cloudai_mbridge.gate.levels import MIN_EFFECT, Departure, Levels, LevelShift, find_levels
from cloudai_mbridge.gate.runs import METRICS, SUCCESS, changed
from cloudai_mbridge.gate.verdict import percent
from cloudai_mbridge.metrics import Direction

_MAX_SHOWN = 6


class Effect(StrEnum):
    """Whether a change is for the worse, for the better, or in a metric that should not change at all."""

    WORSE = "worse"
    BETTER = "better"
    CHANGED = "changed"


@dataclass(frozen=True)
class NamedRun:
    """A run as a person finds it again."""

    run_id: str
    point: str
    ended_at: str
    commit: str | None
    nodes: tuple[str, ...]


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


@dataclass(frozen=True)
class Trends:
    """One metric of several comparability keys."""

    trends: tuple[Trend, ...]


def find_trend(
    series: Series, points: Sequence[str] = (), *, min_effect: float = MIN_EFFECT, assumed_noise: float | None = None
) -> Trend:
    """Find the trend of a series. min_effect, assumed_noise: relative, see `find_levels`."""
    metric = series.metric
    runs = [run for run in series.runs if run.value is not None]
    values = [run.value for run in runs if run.value is not None]
    levels = find_levels(values, min_effect=min_effect, assumed_noise=assumed_noise)
    direction = METRICS[metric].direction
    return Trend(
        points=tuple(points) or tuple(sorted({run.point for run in series.runs})),
        comparability_id=series.comparability_id,
        metric=metric,
        unit=METRICS[metric].unit,
        num_runs=len(runs),
        first_ended_at=runs[0].ended_at if runs else "",
        last_ended_at=runs[-1].ended_at if runs else "",
        unknown=f"no good run has {metric}" if not runs else levels.unknown,
        level=levels.now,
        noise=levels.noise,
        changes=tuple(_changes(levels, runs, direction)),
        drift=_drift(levels, runs, direction),
        notes=tuple(_notes(series, runs, levels)),
    )


def effect_of(change: float, direction: Direction) -> Effect:
    """Classify a relative change."""
    if direction is Direction.SAME:
        return Effect.CHANGED
    return Effect.WORSE if (change > 0) == (direction is Direction.LOWER) else Effect.BETTER


def differences(before: SeriesRun, after: SeriesRun) -> tuple[str, ...]:
    """Diff the environments, points and nodes of two runs, one text per difference: name old -> new."""
    facts = changed(_flat(before.environment), _flat(after.environment))
    found = [f"{name} {_shown(old)} -> {_shown(new)}" for name, (old, new) in sorted(facts.items())]
    if before.point != after.point:
        found.append(f"point {before.point} -> {after.point}")
    signs = (("+", set(after.nodes) - set(before.nodes)), ("-", set(before.nodes) - set(after.nodes)))
    if listed := [_listed(sign, nodes) for sign, nodes in signs if nodes]:
        found.append(f"nodes {' '.join(listed)}")
    return tuple(found)


def _changes(levels: Levels, runs: Sequence[SeriesRun], direction: Direction) -> Iterator[Change]:
    for shift, end in zip(levels.steps, (*levels.starts[2:], len(runs)), strict=False):
        yield _change(
            shift,
            runs,
            direction,
            before=shift.before,
            after=shift.after,
            num_runs=end - shift.index,
            interval=shift.interval,
            earliest=runs[shift.earliest].run_id,
            latest=runs[shift.latest].run_id,
        )
    if (found := levels.departure) is not None:
        level, num_runs = levels.now or levels.values[-1], len(runs) - found.index
        after = level * (1 + found.change)
        yield _change(found, runs, direction, before=level, after=after, num_runs=num_runs, is_level=False)


def _change(found: LevelShift | Departure, runs: Sequence[SeriesRun], direction: Direction, **more: Any) -> Change:
    return Change(
        run=_named(runs[found.index]),
        effect=effect_of(found.change, direction),
        change=found.change,
        differences=differences(runs[found.index - 1], runs[found.index]),
        back_before="" if found.back_to is None else runs[found.back_to].run_id,
        **more,
    )


def _drift(levels: Levels, runs: Sequence[SeriesRun], direction: Direction) -> TrendDrift | None:
    if levels.drift is None:
        return None
    per_100 = levels.drift.per_run * 100
    return TrendDrift(_named(runs[levels.drift.start]), effect_of(per_100, direction), per_100)


def _notes(series: Series, runs: Sequence[SeriesRun], levels: Levels) -> Iterator[str]:
    if (older := series.num_good - len(series.runs)) > 0:
        yield f"the last {len(series.runs)} runs were looked at, and {older} older ones were not; see --last"
    if series.num_failed:
        yield f"{counted(series.num_failed, 'failed run')} in that time counted for nothing"
    if runs and (missing := len(series.runs) - len(runs)):
        yield f"{missing} of {counted(len(series.runs), 'run')} without a comparable {series.metric} left out"
    if shared := sum(number for number in Counter(run.ended_at for run in runs).values() if number > 1):
        yield f"{shared} runs have identical times; they are in the order of their import"
    if len(runs) > 1 and len({run.value for run in runs}) == 1:
        yield f"all {len(runs)} runs have the very same value: nothing is known of the noise"
    if not levels.unknown and levels.noise is None:
        yield "the noise is assumed, not measured"


def _named(run: SeriesRun) -> NamedRun:
    return NamedRun(run.run_id, run.point, run.ended_at, run.commit, run.nodes)


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


def _shown(value: Any) -> str:
    return "(unknown)" if value is None else str(value)


def _listed(sign: str, nodes: set[str]) -> str:
    names = sorted(nodes)
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return " ".join(f"{sign}{name}" for name in names[:_MAX_SHOWN]) + more


_MAX_DIFFERENCES = 12
_COMMIT_DIGITS = 12
RUN_ID_DIGITS = 10
LAST = 500  # runs of a key in a report


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
    if trend.drift is not None:
        drift = trend.drift
        text = f"{drift.effect}: drifts by {percent(drift.per_100_runs)} per 100 runs since run {_run(drift.run)}"
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
    if not change.is_level:
        which = "the last run departs" if change.num_runs == 1 else f"the last {change.num_runs} runs depart"
        runs = counted(change.num_runs, "run")
        near = f"; near the level of before run {_short(change.back_before)}" if change.back_before else ""
        return (
            f"{change.effect}: {which} from the level by {percent(change.change)} ({runs}: not yet a level):"
            f" {values}, from run {_run(change.run)}{near}"
        )
    low, high = change.interval or (change.change, change.change)
    text = (
        f"{change.effect}: {percent(change.change)} ({percent(low)} to {percent(high)}) from run {_run(change.run)}"
        f" on, for {counted(change.num_runs, 'run')}: {values}"
    )
    return f"{text}; back at the level of before run {_short(change.back_before)}" if change.back_before else text


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
        yield f"it may have been anywhere from run {_short(change.earliest)} to run {_short(change.latest)}"


def _run(run: NamedRun) -> str:
    return f"{_short(run.run_id)} ({run.ended_at[:16].replace('T', ' ')})"


def _short(run_id: str) -> str:
    return run_id[:RUN_ID_DIGITS]


def _value(x: float, unit: str) -> str:
    return f"{x:.5g} {unit}".rstrip()


def history_rows(history: History, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the last good runs of every comparability key of a report, with the changes of their step time.

    report: as in report.json.

    BadInput: the history cannot be read.
    """
    keys = dict.fromkeys(point["comparability"]["id"] for point in report["points"] if point["comparability"])
    rows = []
    for key in keys:
        trend = find_trend(history.series(key, DEFAULT_METRIC, LAST))
        changes = {change.run.run_id: change for change in trend.changes}
        rows += [
            {
                "run_id": run.run_id,
                "point": run.point,
                "comparability_id": run.comparability_id,
                "ended_at": run.ended_at,
                "commit": run.commit,
                "values": {name: values[0] for name, values in run.values.items() if len(values) == 1},
                **_change_row(changes.get(run.run_id), trend.unit),
            }
            for run in history.runs(comparability_id=key, verdict=SUCCESS, last=LAST)
        ]
    return rows


def _change_row(change: Change | None, unit: str) -> dict[str, Any]:
    """Return the fields of a change for the page: the lines that the command prints."""
    if change is None:
        return {"is_change": False, "words": "", "about": []}
    return {"is_change": True, "words": _change_text(change, unit), "about": list(_about(change))}
