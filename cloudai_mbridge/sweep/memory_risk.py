"""Points that are predicted not to fit: what is said of them."""

from cloudai_mbridge.constraints import Violation
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.headline import Headline
from cloudai_mbridge.estimate.memory import StageMemory
from cloudai_mbridge.estimate.point import GIB, estimate_point
from cloudai_mbridge.estimate.request import EstimateRequest


def largest_terms(request: EstimateRequest, count: int = 6) -> str:
    """Return the largest terms of the fullest stage; "" where the memory cannot be estimated."""
    try:
        stage = estimate_point(request).worst_stage
    except BadInput:
        return ""
    return _terms(stage, count) if stage else ""


def memory_violation(headline: Headline, share: float, request: EstimateRequest) -> Violation:
    """Return why a point is held back: no rule, since the limit is the user's and the estimate may be wrong."""
    remedy = f"raise sweep.memory_share above {share:g} to run it"
    if headline.memory_share is None:
        fact = f"its memory cannot be predicted: {'; '.join(headline.why) or 'the memory of the GPU is not known'}"
        remedy = "make it known, or leave out sweep.memory_share to run it"
        return Violation("MEMORY", "estimate", fact, remedy, {"memory_share": share})
    needed, given = headline.peak_memory_gib or 0.0, headline.gpu_memory_gib or 0.0
    return Violation(
        rule_id="MEMORY",
        where="estimate",
        fact=f"stage {headline.worst_stage} is predicted to need {needed:.1f} of {given:.0f} GiB, states and"
        f" activations {headline.memory_share:.0%} of it: {largest_terms(request)}",
        remedy=remedy,
        operands={"peak_memory_gib": round(needed, 2), "gpu_memory_gib": given, "memory_share": share},
    )


def _terms(stage: StageMemory, count: int) -> str:
    largest = sorted(stage.terms.items(), key=lambda term: -term[1])
    shown = [f"{name} {size / GIB:.1f}" for name, size in largest[:count] if size]
    rest = sum(size for _, size in largest[count:])
    return ", ".join([*shown, f"other {rest / GIB:.1f}"]) + " GiB"
