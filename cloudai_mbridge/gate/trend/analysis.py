"""Trend of a series of runs: runs at which the level changed, their environment differences, current level."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.compare.groups import changed
from cloudai_mbridge.gate.history.store import Series, SeriesRun
from cloudai_mbridge.gate.results.values import METRICS, Direction
from cloudai_mbridge.gate.trend.level_fit import Departure
from cloudai_mbridge.gate.trend.levels import MIN_EFFECT, Levels, LevelShift, find_levels

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
