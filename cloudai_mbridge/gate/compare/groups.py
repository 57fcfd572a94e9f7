"""Sort the runs of a result by point, and find the reference of each."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.gate.compare.reference import ReferencePoint
from cloudai_mbridge.gate.results.copies import Originals
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.metrics import implausible

FEWEST_STEPS = 5
_SHOWN = 4


@dataclass(frozen=True)
class PointRuns:
    """The runs of one point. failed: (run, why), of those that ended early as well."""

    point: str
    good: tuple[RunResult, ...]
    failed: tuple[tuple[RunResult, str], ...]


def group_by_point(results: Iterable[RunResult], without: Collection[str] = ()) -> tuple[list[PointRuns], list[str]]:
    """Return the points in order, and notes on runs that are left out.

    Of a run that appears twice one counts, and of two judgements the worse. without: ids of runs that are not to
    count, because they are what the others are compared with.
    """
    points: dict[str, list[RunResult]] = {}
    seen: set[str] = set()
    originals, notes = Originals(), []
    for run in sorted(results, key=lambda run: run.is_success):
        place = f"{run.point}, run {run.iteration} of {run.source}"
        if run.run_id in without:
            notes.append(f"{place}: is a run of the reference, and is not compared with itself")
        elif run.run_id in seen or originals.of(run) is not None:
            notes.append(f"{place}: is in the results already; it counts once")
        else:
            seen.add(run.run_id)
            originals.add(run)
            points.setdefault(run.point, []).append(run)
    return [_split(point, runs) for point, runs in points.items()], notes


def _split(point: str, runs: Sequence[RunResult]) -> PointRuns:
    why = [(run, why_not(run)) for run in runs]
    return PointRuns(
        point,
        tuple(run for run, reason in why if not reason),
        tuple((run, reason) for run, reason in why if reason),
    )


def why_not(run: RunResult) -> str:
    """Return why a run does not count, "" if it does. A report may be wrong about its own success."""
    if not run.is_success:
        return "; ".join(run.reasons) or run.verdict
    if run.contradiction:
        return f"the report contradicts itself: {run.contradiction}"
    if run.num_steps is None or run.num_steps < 1:
        return "the requested number of steps is unknown; set max_steps"
    steps = {step.step for step in run.steps}
    first_missing = next(step for step in itertools.count(1) if step not in steps)
    if first_missing <= run.num_steps:
        done = sum(1 <= step <= run.num_steps for step in steps)
        return f"{done} of {run.num_steps} steps are there; the first missing is {first_missing}"
    if reasons := implausible(run.steps, run.num_steps, run.comparability.get("device")):
        return reasons[0]
    if bad := [step for step in run.steps if step.loss is not None and not math.isfinite(step.loss)]:
        return f"the loss is {bad[0].loss} at step {bad[0].step}"
    if len(run.counted_steps) < FEWEST_STEPS:
        return f"{len(run.counted_steps)} steps after the warm-up of {run.warmup_steps}; {FEWEST_STEPS} are needed"
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
            matches.append(Match(runs.point, None, runs, f"{where} has nothing to compare it with"))
            continue
        used.add((found.point, found.comparability_id))
        matches.append(Match(runs.point, found, runs, _difference(found, runs)))
    missing = [reference for reference in references if (reference.point, reference.comparability_id) not in used]
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
            return "its comparability fields are missing; write the report again with this mbridge"
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
