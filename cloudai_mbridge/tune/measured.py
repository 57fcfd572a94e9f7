"""Measured points: from the report of a run or from a table, each with its prediction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Gpu, find_gpu
from cloudai_mbridge.estimate.headlines import Headlines
from cloudai_mbridge.estimate.memory.other import GIB, Assumptions
from cloudai_mbridge.estimate.point import groups_of
from cloudai_mbridge.estimate.request import EstimateRequest, gpu_on, trained_question
from cloudai_mbridge.estimate.time import time_model
from cloudai_mbridge.estimate.time.groups import StepGroups
from cloudai_mbridge.gate.runs import METRICS, RunResult, read_results
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.sweep.checked import with_recipe
from cloudai_mbridge.tune.table import Space, read_table

_CONTEXT_GIB = Assumptions().cuda_context / GIB  # which torch's allocator does not count
_OVERRIDE, _ARGUMENT = "extra.", "args."


@dataclass(frozen=True)
class MeasuredPoint:
    """A point that ran to its end. groups: of its step, as the shipped time model predicts them.

    peak_over_predicted: memory of the fullest GPU, measured over predicted; None if unknown.
    """

    gpu: str
    groups: StepGroups
    step_time_s: float
    peak_over_predicted: float | None = None


@dataclass
class Measurements:
    """Points by GPU, and why others are left out: reason -> number."""

    points: dict[str, list[MeasuredPoint]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, point: MeasuredPoint) -> None:
        """Add a point."""
        self.points.setdefault(point.gpu, []).append(point)

    def leave_out(self, why: str) -> None:
        """Count an unusable point."""
        self.left_out[why] = self.left_out.get(why, 0) + 1


def read_measurements(paths: Sequence[Path]) -> Measurements:
    """Read runs' directories, report.json files and tables (.csv); BadInput: one cannot be read.

    Points with equal predictions are merged, also across files: otherwise none could be held out of a fit.
    """
    found = Measurements()
    for path in paths:
        if path.suffix.lower() == ".csv":
            for space in read_table(path):
                _read_space(space, found)
        else:
            _read_runs(read_results(path), found)
    found.points = {gpu: list(_merged(points)) for gpu, points in found.points.items()}
    return found


def _merged(points: Sequence[MeasuredPoint]) -> Iterator[MeasuredPoint]:
    alike: dict[StepGroups, list[MeasuredPoint]] = {}
    for point in points:
        alike.setdefault(point.groups, []).append(point)
    for same in alike.values():
        peaks = [point.peak_over_predicted for point in same if point.peak_over_predicted is not None]
        times = [point.step_time_s for point in same]
        yield replace(same[0], step_time_s=median(times), peak_over_predicted=median(peaks) if peaks else None)


def _read_space(space: Space, found: Measurements) -> None:
    for row in space.rows:
        if row.step_time_s is None:
            found.leave_out("it ran out of memory")
            continue
        try:
            groups = time_model(space.model_of(row.layout.tp), space.gpu, space.precision).groups(row.layout)
        except BadInput as error:
            found.leave_out(str(error))
            continue
        found.add(MeasuredPoint(space.gpu.name, groups, row.step_time_s))


def _read_runs(runs: Sequence[RunResult], found: Measurements) -> None:
    """Read the runs of a report; repetitions of a point are one."""
    headlines = Headlines()
    for same in _repetitions(runs, found):
        try:
            found.add(_point(same, headlines))
        except BadInput as error:
            found.leave_out(str(error))


def _repetitions(runs: Sequence[RunResult], found: Measurements) -> Iterator[list[RunResult]]:
    """Yield the successful runs of each point."""
    points: dict[str, list[RunResult]] = {}
    for run in runs:
        if not run.is_success:
            found.leave_out(f"its verdict is {run.verdict}")
        else:
            points.setdefault(run.comparability_id, []).append(run)
    yield from points.values()


def _point(runs: Sequence[RunResult], headlines: Headlines) -> MeasuredPoint:
    """Return a point of all its runs; BadInput with the reason if it has no prediction."""
    times = [value[0] for run in runs if (value := METRICS["step_time_s"].of(run))]
    if not times:
        raise BadInput("it has no step time")
    question = question_of(runs[0])
    assert question.gpu is not None  # else `question_of` raises
    groups = groups_of(question)
    peak = headlines.of(question).peak_memory_gib
    reserved = [step.peak_memory_gib for run in runs for step in run.steps if step.peak_memory_gib]
    is_known = reserved and peak and question.args.launcher is Launcher.EMBEDDED  # others' metric is unknown
    share = (max(reserved) + _CONTEXT_GIB) / peak if is_known and peak else None
    return MeasuredPoint(question.gpu.name, groups, fmean(times), share)


def device_of(run: RunResult) -> Gpu | None:
    """Return the GPU of a run; None if its device is unknown."""
    device = run.comparability.get("device")
    gpu = find_gpu(device) if isinstance(device, str) else None
    return gpu if gpu is not None and gpu.is_known else None


def question_of(run: RunResult, system: System | None = None, stand_in: Gpu | None = None) -> EstimateRequest:
    """Return the estimate request of a run.

    system: its calibration applies; None: none does. stand_in: used for an unknown device.
    BadInput: its device, its recipe or its arguments are unknown.
    """
    fields = run.comparability
    gpu = device_of(run)
    if gpu is not None:
        gpu = gpu_on(gpu, system)
    elif (gpu := stand_in) is None:
        raise BadInput(f"its device, {fields.get('device')!r}, is unknown")
    name = str(fields.get("recipe"))
    if name not in recipe_names():
        raise BadInput(f"recipe {name!r} is unknown")
    recipe = load_recipe(name)
    extra = {key.removeprefix(_OVERRIDE): str(value) for key, value in fields.items() if key.startswith(_OVERRIDE)}
    given = {key.removeprefix(_ARGUMENT): value for key, value in fields.items() if key.startswith(_ARGUMENT)}
    of_run = {"launcher": fields.get("launcher"), "num_gpus": fields.get("world_size"), "gpu_type": gpu.name}
    try:
        args = ResolvedCmdArgs.model_validate({**given, **of_run, "compute_dtype": fields.get("dtype")})
    except ValidationError as error:
        raise BadInput(f"its arguments are unknown here: {error.errors()[0]['msg']}") from None
    args = with_recipe(args, recipe)
    if args.launcher is Launcher.EMBEDDED:
        return EstimateRequest(recipe, args, gpu, "", extra)
    return trained_question(recipe, args, None, "its report lacks them", gpu, "", extra)
