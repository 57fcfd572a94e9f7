"""Sort the runs of a result by point, and find the reference of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.gate.reference import ReferencePoint
from cloudai_mbridge.gate.results import RunResult

_SHOWN = 4


@dataclass(frozen=True)
class PointRuns:
    """The runs of one point. failed: (run, why), of those that ended early as well."""

    point: str
    good: tuple[RunResult, ...]
    failed: tuple[tuple[RunResult, str], ...]


def group_by_point(results: Iterable[RunResult]) -> tuple[list[PointRuns], list[str]]:
    """Return the points in order, and notes on runs that were given twice and count once."""
    points: dict[str, list[RunResult]] = {}
    seen: set[object] = set()
    notes = []
    for run in results:
        marks = {run.run_id, _measured(run)} - {None}
        if marks & seen:
            notes.append(f"{run.point}, run {run.iteration} of {run.source}: is in the results already; it counts once")
            continue
        seen |= marks
        points.setdefault(run.point, []).append(run)
    return [_split(point, runs) for point, runs in points.items()], notes


def _measured(run: RunResult) -> object | None:
    """Return what two runs cannot have in common: every step time at full precision."""
    times = tuple(step.step_time_s for step in run.steps)
    is_exact = any(time is not None and round(time, 3) != time for time in times)
    return (run.point, times) if is_exact and len(times) > 1 else None


def _split(point: str, runs: Sequence[RunResult]) -> PointRuns:
    why = [(run, _why_not(run)) for run in runs]
    return PointRuns(
        point,
        tuple(run for run, reason in why if not reason),
        tuple((run, reason) for run, reason in why if reason),
    )


def _why_not(run: RunResult) -> str:
    """Return why a run does not count, "" if it does."""
    if not run.is_success:
        return "; ".join(run.reasons) or run.verdict
    if run.num_steps is not None and len(run.steps) < run.num_steps:
        return f"it has {len(run.steps)} of {run.num_steps} steps"
    return ""


@dataclass(frozen=True)
class Match:
    """A reference with the runs of its point, either of which may be missing. why: what forbids the comparison."""

    point: str
    reference: ReferencePoint | None
    runs: PointRuns | None
    why: str = ""


def match(references: Sequence[ReferencePoint], points: Sequence[PointRuns], where: str) -> list[Match]:
    """Pair the points of a result with their references: by comparability, else by name to say what differs.

    where: the reference in words, for what it lacks.
    """
    matches, used = [], set()
    for runs in points:
        found = _find(references, runs)
        if found is None:
            matches.append(Match(runs.point, None, runs, f"{where} holds nothing to compare it with"))
            continue
        used.add(found.point)
        matches.append(Match(runs.point, found, runs, _difference(found, runs)))
    missing = [reference for reference in references if reference.point not in used]
    return [*matches, *(Match(reference.point, reference, None) for reference in missing)]


def _find(references: Sequence[ReferencePoint], runs: PointRuns) -> ReferencePoint | None:
    same_name = [reference for reference in references if reference.point == runs.point]
    ids = {run.comparability_id for run in runs.good}
    same_work = [reference for reference in references if ids == {reference.comparability_id}]
    both = [reference for reference in same_name if reference in same_work]
    return next(iter([*both, *same_work, *same_name]), None)


def _difference(reference: ReferencePoint, runs: PointRuns) -> str:
    """Return what forbids to compare the good runs with the reference, "" if nothing does."""
    for run in runs.good:
        if not run.comparability_id or not reference.comparability_id:
            return "nothing says what it may be compared with; write the report again with this mbridge"
        if run.comparability_id != reference.comparability_id:
            changes = changed(reference.comparability, run.comparability)
            text = ", ".join(
                f"{name}: {old!r} there, {new!r} here" for name, (old, new) in list(changes.items())[:_SHOWN]
            )
            more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
            return f"differs in {text or 'its comparability key'}{more}"
    return ""


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (old, new) of what differs; what a side does not know is None."""
    names = [*old, *(name for name in new if name not in old)]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
