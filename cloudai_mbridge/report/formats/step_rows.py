"""Every step of every run as a row of a table: the columns that steps.csv and steps.parquet share."""

from collections.abc import Iterable, Iterator
from typing import Any

from cloudai_mbridge.report.model import PointReport

TEXTS = ("key", "test_id", "label", "verdict")
NUMBERS = ("step_time_s", "tflops_per_gpu", "loss", "grad_norm", "peak_memory_gib")
COLUMNS = ("key", "test_id", "label", "iteration", "verdict", "step", "counted", *NUMBERS)


def step_rows(points: Iterable[PointReport]) -> Iterator[tuple[Any, ...]]:
    """Yield the steps of all runs, in order, one at a time. counted: it is after the warm-up, and in the statistics."""
    for point in points:
        warmup = point.metrics.warmup_steps if point.metrics else 0
        head = (point.key, point.test_id, point.label, point.iteration, str(point.verdict))
        for step in point.steps:
            numbers = (getattr(step, name) for name in NUMBERS)
            yield *head, step.step, step.step > warmup, *numbers
