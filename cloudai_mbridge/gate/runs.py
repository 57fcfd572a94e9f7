"""Runs as a gate reads them from reports: their metrics, which of them are good, and references made of them.

Runs are the unit of replication: steps of a run are correlated, so the relevant spread is between runs.
"""

import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cloudai_mbridge.errors import NothingRan
from cloudai_mbridge.logs import SKIPPED, StepRecord
from cloudai_mbridge.metrics import (
    MEASURES,
    TABLE_MEASURES,
    Direction,
    Measure,
    Metrics,
    capped_mean,
    capped_mean_of_rates,
    counted_steps,
    first_step,
    implausible,
    missing_steps,
)
from cloudai_mbridge.plan.read import is_dry_run
from cloudai_mbridge.report.model import PointReport, RunReport, comparability_id
from cloudai_mbridge.report.read import read_report
from cloudai_mbridge.verdict import Verdict

SUCCESS = str(Verdict.SUCCESS)
OF_FLOPS = "tflops_per_gpu"
LOSS_SEGMENTS = 10
FEWEST_STEPS = 5
_HUGE = 1e150  # no clock gives such a value, and sums could overflow
_SHOWN = 4
_LOSS_CURVE, _PLAIN_MEAN = "loss_curve", "step_time_mean_s"
# Copies: agreement of step times that two distinct runs cannot have
_MANY_TIMES, _MANY_VALUES = 10, 5
_AGREEMENT = 1e-6

Values = tuple[float, ...]  # a number, or several for a curve


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    run_id: the same whenever the same run is reported again. point: test_id/label, which its repetitions share.
    comparability: facts that must be equal between comparable results; comparability_id is their digest.
    nodes: host names. ended_at: ISO 8601, of the end of its job, or of the report. environment: of its processes.
    hosts: facts of its nodes from its training.
    """

    run_id: str
    point: str
    iteration: int
    scenario: str
    system: str
    verdict: str
    reasons: tuple[str, ...]
    comparability_id: str
    comparability: Mapping[str, Any]
    steps: tuple[StepRecord, ...]
    warmup_steps: int
    num_steps: int | None
    flops_formula: str | None
    flops_per_step: float | None
    tokens_per_step_per_gpu: float | None
    nodes: tuple[str, ...]
    ended_at: str
    environment: Mapping[str, Any]
    source: str
    hosts: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    first_step: int = 1  # behind a loaded checkpoint

    @property
    def is_success(self) -> bool:
        return self.verdict == SUCCESS

    @property
    def counted_steps(self) -> tuple[StepRecord, ...]:
        """The steps of the statistics."""
        return tuple(counted_steps(self.steps, self.warmup_steps))

    @cached_property
    def values(self) -> Mapping[str, Values]:
        """The metrics by name. Missing measurements are absent."""
        return {name: value for name, metric in METRICS.items() if (value := value_of(metric, self)) is not None}


@dataclass(frozen=True)
class RunValues:
    """Metrics of a run as kept in a baseline or a history, like `RunResult.values`."""

    run_id: str
    values: Mapping[str, Values]
    ended_at: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReferencePoint:
    """The good runs of one point that a result is compared with, from a baseline, the history or a report.

    bounds: metric -> (lower, upper), the relative changes within which it passes, instead of the policy's tolerance.
    """

    point: str
    comparability_id: str
    comparability: Mapping[str, Any]
    flops_formula: str | None
    flops_per_step: float | None
    runs: tuple[RunResult | RunValues, ...]
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PointRuns:
    """The runs of one point, none if it was not run, and the reference to compare them with.

    failed: (run, why), of those that ended early as well. why: reason against the comparison.
    """

    point: str
    good: tuple[RunResult, ...] = ()
    failed: tuple[tuple[RunResult, str], ...] = ()
    reference: ReferencePoint | None = None
    why: str = ""

    @property
    def old(self) -> tuple[RunResult | RunValues, ...]:
        """The runs of the reference."""
        return self.reference.runs if self.reference else ()

    @property
    def is_comparable(self) -> bool:
        return bool(self.good) and self.reference is not None and not self.why


def read_results(path: Path) -> list[RunResult]:
    """Return the runs of a report.json, or of the report in a run's directory. Rejected points are not runs.

    BadInput as `read_report`.
    """
    return runs_of(*read_report(path))


def runs_of(report: RunReport, file: Path) -> list[RunResult]:
    """Return the runs of a report that was read."""
    ran = [point for point in report.points if point.verdict is not Verdict.REJECTED and not point.is_pre_test]
    return [_run(point, report, str(file)) for point in ran]


def without_dry_runs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the paths without dry runs, and a note for each dry run.

    NothingRan: all are dry runs.
    """
    dry = [path for path in paths if is_dry_run(path)]
    if dry and len(dry) == len(paths):
        raise NothingRan(
            f"{', '.join(map(str, dry[:5]))}: dry runs only, so there are no results; give a run's directory"
        )
    return [path for path in paths if path not in dry], [f"{path}: skipped, it is a dry run" for path in dry]


def _run(point: PointReport, report: RunReport, source: str) -> RunResult:
    metrics = point.metrics or Metrics(warmup_steps=0)
    key = point.comparability or {"id": "", "fields": {}}
    # The verdict is no part of its identity: a run that is judged again is the same run
    jobs = [(attempt.get("job_id"), attempt.get("submitted_at")) for attempt in point.attempts]
    steps = [(step.step, step.step_time_s, step.loss) for step in point.steps]
    identity = (report.scenario, report.system, point.key, jobs, steps)
    return RunResult(
        run_id=hashlib.sha256(repr(identity).encode()).hexdigest()[:24],
        point=f"{point.test_id}/{point.label}",
        iteration=point.iteration,
        scenario=report.scenario,
        system=report.system,
        verdict=str(point.verdict),
        reasons=point.reasons,
        comparability_id=key["id"] if key["id"] == comparability_id(key["fields"]) else "",  # else edited: unknown
        comparability=key["fields"],
        steps=point.steps,
        warmup_steps=metrics.warmup_steps,
        num_steps=point.num_steps,
        first_step=first_step(point.run, point.steps),
        flops_formula=metrics.flops_formula,
        flops_per_step=metrics.flops_per_step,
        tokens_per_step_per_gpu=metrics.tokens_per_step_per_gpu,
        nodes=tuple(point.environment.get("nodes") or ()),
        ended_at=str(point.job.get("ended_at") or report.created_at),
        environment=point.environment,
        source=source,
        hosts=_table(_table(point.run.get("environment")).get("hosts")),
        world_size=point.world_size,
    )


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def value_of(metric: Measure, run: RunResult) -> Values | None:
    """Return a metric's numbers of a run, several for a curve; None if a value is missing."""
    done = [step for step in run.steps if step.left_out != SKIPPED]
    found = [getattr(step, metric.step) for step in (run.counted_steps if metric.is_statistic else done)]
    numbers = [value for value in found if value is not None and math.isfinite(value)]
    if not numbers or len(numbers) < len(found):
        return None
    if metric.name == _LOSS_CURVE:
        # Means over up to ten equal stretches of all steps, warm-up included: it trains the same
        segments = min(LOSS_SEGMENTS, len(numbers))
        edges = [round(i * len(numbers) / segments) for i in range(segments + 1)]
        is_huge = max(map(abs, numbers)) > _HUGE
        return None if is_huge else tuple(fmean(numbers[start:end]) for start, end in itertools.pairwise(edges))
    if not metric.is_statistic:
        return (max(numbers),) if max(numbers) > 0 else None
    if min(numbers) <= 0 or max(numbers) >= _HUGE:
        return None
    if metric.name == _PLAIN_MEAN:
        return (fmean(numbers),)
    if not metric.work:
        return ((capped_mean_of_rates if metric.is_rate else capped_mean)(numbers),)
    time, work = capped_mean(numbers), getattr(run, metric.work)
    return (work / time,) if time and work else None


_FIRST, *_OTHERS = TABLE_MEASURES
_LOSS = next(measure for measure in MEASURES if measure.step == "loss")
# docs/gate.md describes them. Of the two renamed ones, only unit, direction and noise_floor are read
METRICS: Mapping[str, Measure] = {
    metric.name: metric
    for metric in (
        _FIRST,
        replace(_FIRST, name=_PLAIN_MEAN),
        *_OTHERS,
        replace(_LOSS, name=_LOSS_CURVE, noise_floor=0.002),
    )
}


def is_value_of(name: str, values: Sequence[float]) -> bool:
    """Return whether the numbers are valid for a metric: a positive number, or the points of a curve."""
    if METRICS[name].direction is Direction.SAME:
        return 0 < len(values) <= LOSS_SEGMENTS and all(map(math.isfinite, values))
    return len(values) == 1 and 0 < values[0] < math.inf


def noise_of(values: Sequence[float]) -> float | None:
    """Return the relative standard deviation of values, None if there is one value or a value is not positive."""
    return stdev(map(math.log, values)) if len(values) > 1 and min(values) > 0 else None


def reference_from_runs(runs: Sequence[RunResult]) -> ReferencePoint:
    """Build a reference from the good runs of one point and one key. At least one run is required.

    If they counted FLOPs by different formulas, the reference has no formula.
    """
    first = runs[0]
    formulas = {(run.flops_formula, run.flops_per_step) for run in runs}
    formula, flops = formulas.pop() if len(formulas) == 1 else (None, None)
    return ReferencePoint(
        point=first.point,
        comparability_id=first.comparability_id,
        comparability=first.comparability,
        flops_formula=formula,
        flops_per_step=flops,
        runs=tuple(run for run in runs if run.is_success),
        environment=first.environment,
    )


def group_by_point(results: Iterable[RunResult], without: Collection[str] = ()) -> tuple[list[PointRuns], list[str]]:
    """Return the points in order, without references, and notes on excluded runs.

    A run that appears twice is counted once, with the worse of two judgements. without: ids of runs to exclude,
    because they are the reference.
    """
    points: dict[str, list[RunResult]] = {}
    originals, notes = Originals(), []
    for run in sorted(results, key=lambda run: run.is_success):
        place = f"{run.point}, run {run.iteration} of {run.source}"
        if run.run_id in without:
            notes.append(f"{place}: is a run of the reference, and is not compared with itself")
        elif originals.of(run) is not None:
            notes.append(f"{place}: is in the results already; it counts once")
        else:
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
    if wrong := missing_steps(run.steps, run.num_steps, run.first_step) or implausible(
        run.steps, run.num_steps, device
    ):
        return wrong[0]
    if bad := [step for step in run.steps if step.loss is not None and not math.isfinite(step.loss)]:
        return f"the loss is {bad[0].loss} at step {bad[0].step}"
    if len(run.counted_steps) < FEWEST_STEPS:
        return f"{len(run.counted_steps)} steps after the warm-up of {run.warmup_steps}; {FEWEST_STEPS} are needed"
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
    """Index of runs for finding runs that appear twice, and copies; a lookup takes constant time."""

    def __init__(self) -> None:
        self._ids: dict[str, RunResult] = {}
        self._runs: dict[tuple[str, int | None], list[RunResult]] = {}

    def add(self, run: RunResult) -> None:
        self._ids.setdefault(run.run_id, run)
        self._runs.setdefault((run.point, _bucket(run)), []).append(run)

    def of(self, run: RunResult) -> RunResult | None:
        """Return the run itself if it was added before, or the original run of the same point if it is a copy."""
        if run.run_id in self._ids:
            return self._ids[run.run_id]
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
