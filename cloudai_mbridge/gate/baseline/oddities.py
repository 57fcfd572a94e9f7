"""What looks wrong in a baseline that is right as such: somebody should look."""

from collections.abc import Iterator
from datetime import datetime

from cloudai_mbridge.gate.baseline.model import Baseline, BaselinePoint
from cloudai_mbridge.gate.baseline.promotion_rules import PRIMARY, Limits, within_a_day
from cloudai_mbridge.gate.compare.policy import MetricPolicy, default_metrics


def oddities(baseline: Baseline, now: datetime, max_age_days: int) -> list[str]:
    """Return one line per oddity. `now` has a time zone."""
    if not baseline.points:
        return ["it has no points, so a gate has nothing to compare with"]
    return [f"{point.point}: {text}" for point in baseline.points for text in _of_point(point, now, max_age_days)]


def _of_point(point: BaselinePoint, now: datetime, max_age_days: int) -> Iterator[str]:
    limits = Limits()
    age = (now - datetime.fromisoformat(point.promoted_at)).days
    if age > max_age_days:
        yield f"was promoted {age} days ago, on {point.promoted_at[:10]}"
    if age < 0:
        yield f"was promoted in the future, at {point.promoted_at}"
    if len(point.runs) < limits.min_runs:
        yield f"has {len(point.runs)} runs, {limits.min_runs} are the rule"
    primary = point.metric(PRIMARY)
    if primary is None:
        yield f"has no {PRIMARY}"
    elif primary.noise is not None and primary.noise > limits.max_noise:
        yield f"{PRIMARY} varies by {primary.noise:.1%} between runs, {limits.max_noise:.1%} is the rule"
    if len({tuple(run.nodes) for run in point.runs}) == 1:
        yield "all its runs are of the same nodes, so the noise between nodes is not in it"
    if len(point.runs) > 1 and within_a_day([run.ended_at for run in point.runs]):
        yield "all its runs ended within a day, so the noise between days is not in it"
    yield from _odd_bounds(point)
    yield from (f"was promoted although {text}" for text in point.accepted)


def _odd_bounds(point: BaselinePoint) -> Iterator[str]:
    built_in = {metric.name: metric for metric in default_metrics()}
    for metric in point.metrics:
        tolerance = built_in.get(metric.name, MetricPolicy(name=metric.name)).tolerance
        if metric.bounds is not None and (metric.bounds.lower, metric.bounds.upper) != (-tolerance, tolerance):
            bounds = f"{metric.bounds.lower:+.1%} to {metric.bounds.upper:+.1%}"
            yield f"{metric.name} has the bounds {bounds}, the built-in tolerance is {tolerance:.1%}"
