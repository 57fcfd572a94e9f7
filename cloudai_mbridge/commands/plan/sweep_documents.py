"""JSON documents of `mbridge sweep plan` and `mbridge sweep explain`."""

from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.constraints import Lifted, NotEvaluated, Violation
from cloudai_mbridge.constraints.engine import RULES
from cloudai_mbridge.constraints.upstream import rule_id
from cloudai_mbridge.files.documents import fill, json_object
from cloudai_mbridge.plan.walk import SweepSummary
from cloudai_mbridge.sweep.checked import CheckedPoint

_NEEDS = json_object(
    "Needs",
    """Predicted needs of a point; None: unknown, for the reasons in `why`.

    memory_share: of the GPU's memory, for states and activations. gpu_hours, cost: of the steps of all its runs.
    """,
    peak_memory_gib=float | None,
    gpu_memory_gib=float | None,
    memory_share=float | None,
    worst_stage=int | None,
    step_time_s=float | None,
    tokens_per_s_per_gpu=float | None,
    tflops_per_gpu=float | None,
    mfu=float | None,
    gpu_hours=float | None,
    cost=float | None,
    why=tuple[str, ...],
)
_PLANNED_POINT = json_object(
    "PlannedPoint",
    """A point that breaks no rule, or one that was asked for. needs: None of one that breaks a rule.

    beyond: the limit of the sweep that leaves it out, "" for none.
    """,
    label=str,
    status=str,
    coordinates=Mapping[str, Any],
    beyond=str,
    needs=_NEEDS | None,
)
_TEST_PLAN = json_object(
    "TestPlan",
    """Counts over all points of a test. predicted, gpu_hours, priced, cost: over those that would run.

    axes: name -> number of values. rejected: by a rule. rules: rule -> points that break it. why: reasons why nothing
    is predicted -> points. examples: the fastest accepted points by prediction, or the first, then the first that are
    held back. left_out: accepted points that were not chosen.
    """,
    test_id=str,
    axes=Mapping[str, int],
    points=int,
    accepted=int,
    held_back=int,
    rejected=int,
    would_run=int,
    predicted=int,
    gpu_hours=float,
    priced=int,
    cost=float | None,
    currency=str,
    why_no_cost=str,
    rules=Mapping[str, int],
    why=Mapping[str, int],
    not_considered=tuple[str, ...],
    notes=list[str],
    examples=[_PLANNED_POINT],
    left_out=int,
)
SWEEP_PLAN = json_object(
    "SweepPlan",
    'The tests of a scenario. calibration: what the predictions are corrected by, "" for nothing.',
    calibration=str,
    tests=[_TEST_PLAN],
)
EXPLANATION = json_object(
    "Explanation",
    'One point. holds: the rules that hold. filled_in: by which preset. memory: its largest terms, "" if not known.',
    test_id=str,
    point=_PLANNED_POINT,
    violations=tuple[Violation, ...],
    lifted=tuple[Lifted, ...],
    not_evaluated=list[NotEvaluated],
    holds=list[str],
    filled_in=str,
    memory=str,
)


def status_of(look: CheckedPoint) -> str:
    """Return the decision about a point, in a word or two."""
    if look.headline is None:
        return "rejected"
    if look.is_held_back or not look.is_run:
        return "held back" if look.is_held_back else "over the limits"
    return "left out" if look.left_out else "accepted"


def as_point(look: CheckedPoint) -> dict[str, Any]:
    needs = None
    if look.headline is not None:
        needs = fill(_NEEDS, look.headline, gpu_hours=look.gpu_hours, cost=look.cost)
    return fill(_PLANNED_POINT, look, status=status_of(look), needs=needs)


def as_test(summary: SweepSummary, notes: list[str]) -> dict[str, Any]:
    """Return the counts of a test in their document form."""
    examples = [as_point(look) for look in (*summary.examples, *(look for look, _ in summary.held_examples))]
    rejected = summary.points - summary.accepted - summary.held_back
    return fill(_TEST_PLAN, summary, rejected=rejected, notes=notes, examples=examples)


def as_explanation(test_id: str, look: CheckedPoint, filled_in: str, memory: str) -> dict[str, Any]:
    """Return the full explanation of a point in its document form."""
    answers = look.answers
    decided = {answer.rule_id for answer in answers}
    return fill(
        EXPLANATION,
        look,
        test_id=test_id,
        point=as_point(look),
        not_evaluated=[answer for answer in answers if isinstance(answer, NotEvaluated)],
        holds=[name for name in map(rule_id, RULES) if name not in decided],
        filled_in=filled_in,
        memory=memory,
    )
