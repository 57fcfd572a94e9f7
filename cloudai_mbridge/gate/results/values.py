"""The metrics of a gate: one value per run, robust against single slow steps.

Runs are the unit of replication: steps of a run are correlated, so the relevant spread is between runs.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.metrics import PRIMARY, TABLE_MEASURES, Direction, Measure, capped_mean, capped_mean_of_rates

__all__ = ["METRICS", "OF_FLOPS", "PRIMARY", "Direction", "Metric", "is_value_of"]

OF_FLOPS = "tflops_per_gpu"
LOSS_SEGMENTS = 10
_HUGE = 1e150  # no clock gives such a value, and sums could overflow


@dataclass(frozen=True)
class Metric:
    """How a run's value is taken. `of` returns numbers (several for a curve), or None if a value is missing.

    noise_floor: least relative noise between runs that is believed, of what is often the same to the last digit in
    every run; 0 for times, of which that would be suspicious.
    """

    name: str
    unit: str
    direction: Direction
    of: Callable[[RunResult], tuple[float, ...] | None]
    noise_floor: float = 0.0


def _all_finite(values: Sequence[float | None]) -> list[float] | None:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return numbers if numbers and len(numbers) == len(values) else None


def _over_counted(name: str, reduce: Callable[[Sequence[float]], float]) -> Callable[[RunResult], tuple[float] | None]:
    def value(run: RunResult) -> tuple[float] | None:
        numbers = _all_finite([getattr(step, name) for step in run.counted_steps])
        return (reduce(numbers),) if numbers and min(numbers) > 0 and max(numbers) < _HUGE else None

    return value


def _metric(measure: Measure) -> Metric:
    """Return the metric of a measure: its capped mean, or its largest value."""
    mean = _over_counted(measure.step, capped_mean_of_rates if measure.is_rate and not measure.work else capped_mean)

    def per_time(run: RunResult) -> tuple[float] | None:
        times, work = mean(run), getattr(run, measure.work)
        return (work / times[0],) if times and work else None

    def largest(run: RunResult) -> tuple[float] | None:
        numbers = _all_finite([getattr(step, measure.step) for step in run.steps])
        return (max(numbers),) if numbers and max(numbers) > 0 else None

    of = largest if not measure.is_statistic else per_time if measure.work else mean
    return Metric(measure.name, measure.unit, measure.direction, of, measure.noise_floor)


def _loss_curve(run: RunResult) -> tuple[float, ...] | None:
    """Return the means over up to ten equal stretches of all steps, warm-up included: it trains the same."""
    losses = _all_finite([step.loss for step in run.steps])
    if not losses or max(map(abs, losses)) > _HUGE:
        return None
    segments = min(LOSS_SEGMENTS, len(losses))
    edges = [round(i * len(losses) / segments) for i in range(segments + 1)]
    return tuple(fmean(losses[start:end]) for start, end in itertools.pairwise(edges))


_FIRST, *_OTHERS = TABLE_MEASURES
# docs/gate.md describes them
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        _metric(_FIRST),
        Metric("step_time_mean_s", "s", Direction.LOWER, _over_counted("step_time_s", fmean)),
        *map(_metric, _OTHERS),
        Metric("loss_curve", "", Direction.SAME, _loss_curve, 0.002),
    )
}


def is_value_of(name: str, values: Sequence[float]) -> bool:
    """Return whether the numbers are valid for a metric: a positive number, or the points of a curve."""
    if METRICS[name].direction is Direction.SAME:
        return 0 < len(values) <= LOSS_SEGMENTS and all(map(math.isfinite, values))
    return len(values) == 1 and 0 < values[0] < math.inf
