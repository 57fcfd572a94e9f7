"""Measured points: from the report of a run or from a table, each with its prediction.

A table has a row for each measured layout, and rows of one model, batch and number of GPUs are a space. Rows of one
layout are measurements of it: their median counts. If one of them did not run out of memory, it fits.

Columns: gpu, num_gpus, gbs, mbs, seq_length, tp, pp, cp, vp, ep, step_time_s (seconds, or "oom"), and either recipe, or
num_layers, hidden_size, num_attention_heads, num_query_groups, ffn_hidden_size and vocab_size. etp and precision may be
given; they are tp and bf16 otherwise.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Gpu, Precision, find_gpu, gpu_named, precision_named
from cloudai_mbridge.estimate.headline import Headlines
from cloudai_mbridge.estimate.memory import ParallelLayout
from cloudai_mbridge.estimate.memory.estimate import GIB, Assumptions
from cloudai_mbridge.estimate.point import groups_of
from cloudai_mbridge.estimate.request import EstimateRequest, gpu_on, trained_question
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.estimate.time.parts import StepGroups
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.gate.runs import METRICS, RunResult, read_results
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.sweep.checked import with_recipe

_SIZES = ("tp", "pp", "cp", "vp", "ep")
_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size")
_NEEDED = ("gpu", "num_gpus", "gbs", "mbs", "seq_length", *_SIZES, "step_time_s")
_EXPERTS = "num_moe_experts"
OUT_OF_MEMORY = "oom"
_DIGITS = 9  # of a size
_SHORTEST_S, _LONGEST_S = 1e-7, 1e9


@dataclass(frozen=True)
class MeasuredLayout:
    """A measured layout. step_time_s: None if it ran out of memory."""

    layout: ParallelLayout
    step_time_s: float | None


@dataclass(frozen=True)
class Space:
    """The layouts of one model on so many GPUs with one batch."""

    name: str
    model: Architecture
    gpu: Gpu
    precision: Precision
    rows: tuple[MeasuredLayout, ...]

    def model_of(self, tp: int) -> Architecture:
        """Return the model as this tensor parallel size pads its vocabulary."""
        return replace(self.model, tensor_model_parallel_size=tp)


def read_table(path: Path) -> list[Space]:
    """Return the spaces of a table, in the order of their first rows.

    Raises BadInput: the file cannot be read, a column or all rows are missing, or a value is invalid; names the line.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as text ({error})") from None
    reader = csv.DictReader(lines, restval="")
    try:
        if not (spaces := _spaces(_rows(reader))):
            raise BadInput("no row below the names of the columns; add measurements")
        return spaces
    except BadInput as error:
        raise BadInput(f"{path}: line {max(reader.line_num, 1)}: {error}") from None
    except csv.Error as error:  # of a line that does not count as read
        raise BadInput(f"{path}: line {reader.line_num + 1}: {error}; check the line") from None


def _rows(reader: "csv.DictReader[str]") -> Iterator[tuple[Space, MeasuredLayout]]:
    names = reader.fieldnames or ()
    needed = _NEEDED if "recipe" in names else (*_NEEDED, *_MODEL)
    if missing := [name for name in needed if name not in names]:
        raise BadInput(f"missing column: {', '.join(missing)}; add it")
    if double := [name for name in needed if names.count(name) > 1]:
        raise BadInput(f"there are several columns {', '.join(double)}; leave one")
    yield from (_read(row) for row in reader if any(isinstance(text, str) and text.strip() for text in row.values()))


def _spaces(rows: Iterable[tuple[Space, MeasuredLayout]]) -> list[Space]:
    spaces: dict[tuple[object, ...], dict[ParallelLayout, list[float | None]]] = {}
    heads: dict[tuple[object, ...], Space] = {}
    for space, row in rows:
        layout = row.layout
        key = (
            replace(space.model, tensor_model_parallel_size=1),
            space.gpu.name,
            layout.num_gpus,
            layout.gbs,
            space.precision,
        )
        heads.setdefault(key, space)
        spaces.setdefault(key, {}).setdefault(layout, []).append(row.step_time_s)
    return [
        replace(head, rows=tuple(MeasuredLayout(layout, _median(times)) for layout, times in spaces[key].items()))
        for key, head in heads.items()
    ]


def _median(times: Iterable[float | None]) -> float | None:
    known = [seconds for seconds in times if seconds is not None]
    return median(known) if known else None


def _read(columns: Mapping[str, str]) -> tuple[Space, MeasuredLayout]:
    """Return a row, and a space that has no rows yet."""
    size: dict[str, Any] = {name: _size(columns, name) for name in ("num_gpus", "gbs", "mbs", "seq_length", *_SIZES)}
    etp = _size(columns, "etp") if columns.get("etp", "").strip() else None
    gpu, precision = gpu_named(columns["gpu"].strip()), precision_named(columns.get("precision", "").strip() or "bf16")
    recipe = columns.get("recipe", "").strip()
    model = _recipe_model(recipe, size) if recipe else _model(columns, size)
    layout = ParallelLayout(**size, etp=etp, precision=precision)
    name = recipe or f"{model.num_layers} layers of {model.hidden_size}"
    if layout.ep > 1 and model.num_moe_experts is None:
        raise BadInput(f"ep: {layout.ep}, but the model ({name}) has no experts; use 1, or a recipe with experts")
    where = f"{name} on {layout.num_gpus} {gpu.name}, batch {layout.gbs} x {layout.seq_length}"
    return Space(where, model, gpu, precision, ()), MeasuredLayout(layout, _seconds(columns["step_time_s"]))


def _recipe_model(name: str, size: Mapping[str, int]) -> Architecture:
    return architecture(load_recipe(name), ResolvedCmdArgs(seq_length=size["seq_length"], tp=size["tp"]))


def _model(columns: Mapping[str, str], size: Mapping[str, int]) -> Architecture:
    sizes: dict[str, Any] = {name: _size(columns, name) for name in _MODEL}
    if (columns.get(_EXPERTS) or "").strip() not in ("", "0", "1"):
        raise BadInput(f"{_EXPERTS}: {columns[_EXPERTS]}, but these columns describe dense models; name a recipe")
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise BadInput(f"hidden_size: {sizes['hidden_size']} is not divisible by num_attention_heads")
    return Architecture(
        recipe="",
        **sizes,
        kv_channels=sizes["hidden_size"] // sizes["num_attention_heads"],
        seq_length=size["seq_length"],
        tensor_model_parallel_size=size["tp"],
    )


def _size(columns: Mapping[str, str], name: str) -> int:
    text = columns[name].strip()
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or int(text) < 1:
        raise BadInput(f"{name}: {text!r} is not a whole number from 1 to {10**_DIGITS - 1}")
    return int(text)


def _seconds(text: str) -> float | None:
    text = text.strip().lower()
    if text == OUT_OF_MEMORY:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise BadInput(f"step_time_s: {text!r} is neither seconds nor {OUT_OF_MEMORY!r}")
    return seconds


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
