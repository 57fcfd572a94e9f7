"""Where a report contradicts itself. What decides is derived from the steps again, and has to agree.

A report may lack what it could be checked by, as small ones do: only what is there is compared.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from cloudai_mbridge.errors import shown
from cloudai_mbridge.gate.results.model import REJECTED, SUCCESS, MetricsModel, PointModel, ReportModel
from cloudai_mbridge.metrics.statistics import Statistic, summarize

# these cancel where all values are alike; what other versions write besides is not ours to judge
_EXACT = {field.name for field in fields(Statistic)} - {"std", "capped_std"}


def contradiction(point: PointModel) -> str:
    """Return the first contradiction within a run, "" if there is none. A run that failed counts as failed anyway."""
    return next(_contradictions(point), "") if point.verdict == SUCCESS else ""


def wrong_summary(report: ReportModel) -> str:
    """Return where the report's summary differs from its points, "" if nowhere."""
    counts = Counter(point.verdict for point in report.points)
    # of rejected points not all are listed
    said = {name: number for name, number in (report.summary or {}).items() if name != REJECTED}
    wrong = (name for name, number in said.items() if counts[name] != number)
    return next(
        (f"its summary has {shown(said[name])} {name}, and {counts[name]} of its points are" for name in wrong), ""
    )


def _contradictions(point: PointModel) -> Iterator[str]:
    yield from _verdict(point)
    if point.metrics is not None:
        for rule in (_key, _steps, _work):
            yield from rule(point, point.metrics)


def _verdict(point: PointModel) -> Iterator[str]:
    if point.reasons:
        yield f"the verdict is success, and there are reasons against it: {point.reasons[0][:200]}"
    if point.failure is not None:
        yield "the verdict is success, and there is a failure"
    if point.metrics is None:
        yield "the verdict is success, and there are no metrics"
    for job in (point.job, *point.attempts[-1:]):
        if job.get("job_class") == "stopped":  # as was asked, whatever its last words
            continue
        for name in ("exit_code", "signal"):
            if job.get(name) not in (None, 0):
                yield f"the verdict is success, and the job has {name} {shown(job[name])}"
        if job.get("job_class", "succeeded") != "succeeded":
            yield f"the verdict is success, and the job is {shown(job['job_class'])}"


def _key(point: PointModel, metrics: MetricsModel) -> Iterator[str]:
    """Compare what the comparability key says with what the run says."""
    key = point.comparability.fields if point.comparability else {}
    said = {"warmup_steps": metrics.warmup_steps, "num_steps": point.num_steps}
    said |= {"num_nodes": point.num_nodes, "world_size": point.world_size}
    for name, value in said.items():
        if name in key and value is not None and key[name] != value:
            yield f"{name} is {shown(value)}, and {shown(key[name])} in the comparability fields"


def _steps(point: PointModel, metrics: MetricsModel) -> Iterator[str]:
    """Compare the statistics with those of the steps."""
    pairs = itertools.pairwise(step.step for step in point.steps)
    if wrong := [pair for pair in pairs if pair[1] <= pair[0]]:
        yield f"step {wrong[0][1]} comes after step {wrong[0][0]}"
    counted = [step for step in point.steps if step.step > metrics.warmup_steps]
    tokens = metrics.tokens_per_step_per_gpu or 0.0
    rates = [tokens / step.step_time_s if tokens and step.step_time_s else None for step in counted]
    values = {
        "step_time_s": [step.step_time_s for step in counted],
        "tflops_per_gpu": [step.tflops_per_gpu for step in counted],
        "tokens_per_s_per_gpu": rates,
    }
    for name, numbers in values.items():
        statistic = summarize(numbers, are_rates=name != "step_time_s" and all(numbers))
        found = vars(statistic) if statistic else {}
        for part, said in (getattr(metrics, name) or {}).items():
            if part in _EXACT and not _equal(said, found.get(part)):
                yield f"metrics.{name}.{part} is {shown(said)}, and not what the steps give"
    if metrics.window is not None and counted and list(metrics.window) != [counted[0].step, counted[-1].step]:
        yield f"metrics.window is {list(metrics.window)}, and steps {counted[0].step} to {counted[-1].step} count"
    memory = summarize([step.peak_memory_gib for step in point.steps])
    if metrics.peak_memory_gib is not None and not _equal(metrics.peak_memory_gib, memory.max if memory else None):
        yield f"metrics.peak_memory_gib is {metrics.peak_memory_gib!r}, and not what the steps give"


def _equal(one: Any, other: Any) -> bool:
    numbers = [value for value in (one, other) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < 2:
        return bool(one == other)
    try:
        return math.isclose(*numbers, rel_tol=1e-9)
    except OverflowError:  # an integer that no float holds is not what steps give
        return False


def _work(point: PointModel, metrics: MetricsModel) -> Iterator[str]:
    """Compare the work of a step with what the run and its arguments say of it."""
    flops = point.run.get("flops_per_step")
    if metrics.flops_per_step is not None and flops is not None and not _equal(metrics.flops_per_step, flops):
        yield f"metrics.flops_per_step is {metrics.flops_per_step!r}, and the run says {shown(flops)}"
    batch, length, said = point.args.get("gb"), point.args.get("seq_length"), metrics.tokens_per_step_per_gpu
    if said is not None and isinstance(batch, int) and isinstance(length, int) and point.world_size:
        try:
            tokens = batch * length / point.world_size
        except OverflowError:  # too large for a float
            tokens = math.nan
        if not _equal(said, tokens):
            yield f"metrics.tokens_per_step_per_gpu is {said!r}, and the arguments give {tokens!r}"
