"""Reject the points that a rehearsal has refused, as if they had broken a rule."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from cloudai_mbridge.constraints.rehearsed import REHEARSED, refused
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan import RejectedPoint, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.build import MOST_REJECTED_ROWS, assign_arrays
from cloudai_mbridge.rehearsal.record import Rehearsal, RehearsalVerdict, RehearsedPoint, lines_of


def without_refused(plan: ScenarioPlan, system: System, rehearsal: Rehearsal) -> ScenarioPlan:
    """Return a plan whose refused points are rejected by R01, with a note on the others.

    BadInput: a check that comes before all points is refused: nothing could run.
    """
    points = {(point.test_id, point.label): point for point in rehearsal.of(RehearsalVerdict.REFUSED)}
    gone = {run.key: points[place] for run in plan.runs if (place := (run.test_id, run.label)) in points}
    for run in plan.runs:
        if run.key in gone and run.goes_first:
            raise BadInput(f"{run.test_id}/{run.label}: runs before all points, and is refused: {gone[run.key].reason}")
    firsts = {(run.test_id, run.label): run for run in reversed(plan.runs) if run.key in gone}
    rejected, counts = list(plan.rejected), Counter(plan.rule_counts)
    rows = Counter(point.test_id for point in rejected)
    for place, run in reversed(firsts.items()):
        counts[REHEARSED] += 1
        if rows[run.test_id] < MOST_REJECTED_ROWS:
            rejected.append(_rejected(run, points[place]))
        rows[run.test_id] += 1
    kept = [run for run in plan.runs if run.key not in gone]
    if gone:  # the arrays that they were in are smaller
        kept = [replace(run, array="", array_index=0) for run in kept]
    return replace(
        plan,
        runs=assign_arrays(kept, system) if gone else plan.runs,
        rejected=tuple(rejected),
        num_rejected=plan.num_rejected + len(firsts),
        rule_counts=dict(sorted(counts.items())),
        notes=(*plan.notes, *lines_of(rehearsal), *_unknown(rehearsal)),
    )


def _rejected(run: RunPlan, point: RehearsedPoint) -> RejectedPoint:
    first = point.refusals[0]
    broken = refused(
        first.stage,
        first.kind,
        first.message,
        rank=first.rank,
        keys=first.keys,
        where=first.where[-1] if first.where else "",
        core=point.megatron_core,
    )
    return RejectedPoint(run.test_id, run.test_name, run.label, run.coordinates, (broken,))


def _unknown(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield why points were not evaluated, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for point in rehearsal.of(RehearsalVerdict.NOT_EVALUATED):
        by_reason.setdefault(point.reason, []).append(point.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"not rehearsed: {names[0]}{more}: {reason}"
