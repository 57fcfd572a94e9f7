"""A trend as human-readable sentences. Names are as in the reports: the caller makes them printable."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.compare.words import percent
from cloudai_mbridge.gate.history.store import DEFAULT_METRIC, History
from cloudai_mbridge.gate.results.read import SUCCESS
from cloudai_mbridge.gate.trend.analysis import Change, Effect, NamedRun, Trend, find_trend

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
        lines.append((_change(change, trend.unit), change.effect))
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


def _change(change: Change, unit: str) -> str:
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
    return {"is_change": True, "words": _change(change, unit), "about": list(_about(change))}
