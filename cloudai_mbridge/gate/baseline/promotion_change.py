"""What a promotion changes for the worse. It is stricter than a gate: beyond the margin is enough, significant or not.

Many promotions, each within the margin, could carry a baseline far away. So each metric has an anchor, its best value
since a regression was last accepted, and no promotion may be beyond the tolerance from that.
"""

from collections.abc import Sequence

from cloudai_mbridge.gate.baseline.model import BaselineMetric, BaselinePoint, Value, as_list
from cloudai_mbridge.gate.compare.policy import MetricPolicy, default_metrics
from cloudai_mbridge.gate.results.values import Direction

_TFLOPS = "tflops_per_gpu"


def regressions(old: BaselinePoint, new: BaselinePoint, limits: Sequence[MetricPolicy]) -> dict[str, str]:
    """Return metric -> what is worse about it, of the same work.

    Limits that are not given are the built-in ones. What has none, or follows another metric, is that in other units.
    """
    found = {
        metric.name: f"{metric.name} was measured, and is not any more"
        for metric in old.metrics
        if new.metric(metric.name) is None
    }
    by_name = {limit.name: limit for limit in (*default_metrics(), *limits)}
    for before in old.metrics:
        limit, after = by_name.get(before.name), new.metric(before.name)
        if limit is None or limit.follows or after is None or _counts_otherwise(before.name, old, new):
            continue
        if text := _worse(before, after, limit):
            found[before.name] = text
    return found


def _counts_otherwise(metric: str, old: BaselinePoint, new: BaselinePoint) -> bool:
    """Return whether a metric is of FLOPs that were counted by another formula."""
    return metric == _TFLOPS and (old.flops_formula, old.flops_per_step) != (new.flops_formula, new.flops_per_step)


def with_anchors(old: BaselinePoint, new: BaselinePoint, accepted: dict[str, str]) -> BaselinePoint:
    """Return the new point with the old one's anchors, but for what was accepted."""
    metrics = [
        metric
        if metric.name in accepted or _counts_otherwise(metric.name, old, new)
        else _anchored(old.metric(metric.name), metric)
        for metric in new.metrics
    ]
    return new.model_copy(update={"metrics": metrics, "accepted": list(accepted.values())})


def _worse(before: BaselineMetric, after: BaselineMetric, limit: MetricPolicy) -> str:
    """Return what is worse, "" if nothing is."""
    anchor = before.anchor or before.value
    if len(as_list(before.value)) != len(as_list(after.value)):
        return f"{limit.name} has {len(as_list(after.value))} values, {len(as_list(before.value))} before"
    step, drift = (_change(value, after.value, after.direction) for value in (before.value, anchor))
    if abs(step) > limit.margin:
        return f"{limit.name} is worse by {step:+.2%} than the baseline, beyond the margin of {limit.margin:.2%}"
    if abs(drift) > limit.tolerance:
        return (
            f"{limit.name} has drifted by {drift:+.2%} from the best baseline since a regression was accepted,"
            f" beyond the tolerance of {limit.tolerance:.2%}"
        )
    return ""


def _change(before: Value, after: Value, direction: Direction) -> float:
    """Return the largest relative change for the worse, 0 if there is none."""
    changes = [b / a - 1 for a, b in zip(as_list(before), as_list(after), strict=True)]
    match direction:
        case Direction.LOWER:
            worse = [change for change in changes if change > 0]
        case Direction.HIGHER:
            worse = [change for change in changes if change < 0]
        case Direction.SAME:
            worse = changes
    return max(worse, key=abs, default=0.0)


def _anchored(before: BaselineMetric | None, after: BaselineMetric) -> BaselineMetric:
    if before is None or len(as_list(before.value)) != len(as_list(after.value)):
        return after
    pairs = zip(as_list(before.anchor or before.value), as_list(after.value), strict=True)
    match after.direction:
        case Direction.LOWER:
            best = [min(pair) for pair in pairs]
        case Direction.HIGHER:
            best = [max(pair) for pair in pairs]
        case Direction.SAME:
            best = [old for old, _ in pairs]
    return after.model_copy(update={"anchor": best if isinstance(after.value, list) else best[0]})
