"""Group the runs of a result by point, and find the reference of each point."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.gate.compare.reference import ReferencePoint
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.metrics import implausible, missing_steps

FEWEST_STEPS = 5
_SHOWN = 4
# Copies: agreement of step times that two distinct runs cannot have
_MANY_TIMES, _MANY_VALUES = 10, 5
_AGREEMENT = 1e-6


@dataclass(frozen=True)
class PointRuns:
    """The runs of one point. failed: (run, why), of those that ended early as well."""

    point: str
    good: tuple[RunResult, ...]
    failed: tuple[tuple[RunResult, str], ...]


def group_by_point(results: Iterable[RunResult], without: Collection[str] = ()) -> tuple[list[PointRuns], list[str]]:
    """Return the points in order, and notes on excluded runs.

    A run that appears twice is counted once, with the worse of two judgements. without: ids of runs to exclude,
    because they are the reference.
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
    grouped = []
    for point, runs in points.items():
        why = [(run, why_not(run)) for run in runs]
        good = tuple(run for run, reason in why if not reason)
        grouped.append(PointRuns(point, good, tuple((run, reason) for run, reason in why if reason)))
    return grouped, notes


def why_not(run: RunResult) -> str:
    """Return why a run is excluded, "" if it is not. A report may be wrong about its own success."""
    if not run.is_success:
        return "; ".join(run.reasons) or run.verdict
    if run.num_steps is None or run.num_steps < 1:
        return "the requested number of steps is unknown; set max_steps"
    device = run.comparability.get("device")
    if wrong := missing_steps(run.steps, run.num_steps) or implausible(run.steps, run.num_steps, device):
        return wrong[0]
    if bad := [step for step in run.steps if step.loss is not None and not math.isfinite(step.loss)]:
        return f"the loss is {bad[0].loss} at step {bad[0].step}"
    if len(run.counted_steps) < FEWEST_STEPS:
        return f"{len(run.counted_steps)} steps after the warm-up of {run.warmup_steps}; {FEWEST_STEPS} are needed"
    return ""


@dataclass(frozen=True)
class Match:
    """A reference with the runs of its point, either of which may be missing. why: reason against the comparison."""

    point: str
    reference: ReferencePoint | None
    runs: PointRuns | None
    why: str = ""


def match(
    references: Sequence[ReferencePoint], points: Sequence[PointRuns], where: str, left_out: Mapping[str, str]
) -> list[Match]:
    """Pair the points of a result with their references: by comparability, else by name to report the differences.

    where: name of the reference, for messages. left_out: points that were not chosen to run, and why.
    """
    found = [(runs, _find(references, runs)) for runs in points]
    used = {(reference.point, reference.comparability_id) for _, reference in found if reference is not None}
    no_reference = f"{where} has nothing to compare it with"
    missing = [each for each in references if (each.point, each.comparability_id) not in used]
    names = {each.point for each in missing}
    why = {name: f"left out: {left_out[name]}" for name in left_out if all(name != runs.point for runs in points)}
    return [
        *(
            Match(runs.point, each, runs, no_reference if each is None else _difference(each, runs))
            for runs, each in found
        ),
        *(Match(each.point, each, None, why.get(each.point, "")) for each in missing),
        *(Match(name, None, None, text) for name, text in why.items() if name not in names),
    ]


def _find(references: Sequence[ReferencePoint], runs: PointRuns) -> ReferencePoint | None:
    same_name = [reference for reference in references if reference.point == runs.point]
    ids = {run.comparability_id for run in runs.good}
    same_work = [reference for reference in references if ids == {reference.comparability_id}]
    both = [reference for reference in same_name if reference in same_work]
    return next(iter([*both, *same_work, *same_name]), None)


def _difference(reference: ReferencePoint, runs: PointRuns) -> str:
    """Return why the good runs and the reference are not comparable, "" if they are."""
    for run in runs.good:
        if not run.comparability_id or not reference.comparability_id:
            return "its comparability fields are missing; write the report again with this mbridge"
        if run.comparability_id != reference.comparability_id:
            changes = changed(reference.comparability, run.comparability)
            return f"differs in {name_changes(changes, '{}: {!r} there, {!r} here') or 'its comparability key'}"
    return ""


def name_changes(changes: Mapping[str, tuple[object, object]], form: str = "{} {!r} -> {!r}") -> str:
    """Format the first few changes as text, "" without any."""
    shown = [form.format(name, old, new) for name, (old, new) in list(changes.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else "")


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (old, new) of the differences; None if missing on a side."""
    names = [*old, *(name for name in new if name not in old)]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


class Originals:
    """Index of runs for finding copies; a lookup takes constant time."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int | None], list[RunResult]] = {}

    def add(self, run: RunResult) -> None:
        self._runs.setdefault((run.point, _bucket(run)), []).append(run)

    def of(self, run: RunResult) -> RunResult | None:
        """Return the original run of the same point if the run is a copy."""
        place = _bucket(run)
        near = (None,) if place is None else (place - 1, place, place + 1)
        others = (other for bucket in near for other in self._runs.get((run.point, bucket), ()))
        return next((other for other in others if _is_copy(run, other)), None)


def _bucket(run: RunResult) -> int | None:
    """Return a number that differs by at most one between runs whose first step times agree."""
    first = run.steps[0].step_time_s if run.steps else None
    return math.floor(math.log(first) / (2 * _AGREEMENT)) if first and 0 < first < math.inf else None


def _is_copy(run: RunResult, other: RunResult) -> bool:
    """Return whether all step times agree to a millionth, and are many, or at least two at full precision.

    A few rounded times, as in Megatron-Bridge's lines, do not distinguish runs.
    """
    if len(run.steps) != len(other.steps):
        return False
    pairs = zip(run.steps, other.steps, strict=True)
    if not all(_agree(one.step_time_s, two.step_time_s) for one, two in pairs):
        return False
    times = [step.step_time_s for step in run.steps if step.step_time_s is not None]
    is_exact = len(run.steps) > 1 and any(not _agree(round(time, 3), time) for time in times if math.isfinite(time))
    is_long = len(run.steps) >= _MANY_TIMES and len({f"{time:.6g}" for time in times}) >= _MANY_VALUES
    return is_exact or is_long


def _agree(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=_AGREEMENT)
