"""Measured points: from the report of a run or from a table, each with its prediction.

A table has a row for each measured layout, and rows of one model, batch and number of GPUs are a space. Rows of one
layout are measurements of it: their median counts. If one of them did not run out of memory, it fits.

Columns: gpu, num_gpus, gbs, mbs, seq_length, tp, pp, cp, vp, ep, step_time_s (seconds, or "oom"), and either recipe, or
num_layers, hidden_size, num_attention_heads, num_query_groups, ffn_hidden_size and vocab_size. etp and precision may be
given; they are tp and bf16 otherwise.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Gpu, Precision, find_gpu, gpu_named, precision_named
from cloudai_mbridge.estimate.headline import Headline, headline_estimator
from cloudai_mbridge.estimate.memory.estimate import GIB, Assumptions
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.point import groups_of
from cloudai_mbridge.estimate.request import EstimateRequest, gpu_on, trained_question
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.estimate.time.parts import StepGroups
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.gate.runs import METRICS, RunResult, read_results, value_of
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
class Space:
    """The layouts of one model on so many GPUs with one batch. rows: each with its seconds, None if out of memory."""

    name: str
    model: Architecture
    gpu: Gpu
    precision: Precision
    rows: tuple[tuple[ParallelLayout, float | None], ...]

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
        if not (spaces := _spaces(reader)):
            raise BadInput("no row below the names of the columns; add measurements")
        return spaces
    except BadInput as error:
        raise BadInput(f"{path}: line {max(reader.line_num, 1)}: {error}") from None
    except csv.Error as error:  # of a line that does not count as read
        raise BadInput(f"{path}: line {reader.line_num + 1}: {error}; check the line") from None


def _spaces(reader: "csv.DictReader[str]") -> list[Space]:
    names = reader.fieldnames or ()
    needed = _NEEDED if "recipe" in names else (*_NEEDED, *_MODEL)
    if missing := [name for name in needed if name not in names]:
        raise BadInput(f"missing column: {', '.join(missing)}; add it")
    if double := [name for name in needed if names.count(name) > 1]:
        raise BadInput(f"there are several columns {', '.join(double)}; leave one")
    heads, rows = dict[Hashable, Space](), dict[Hashable, dict[ParallelLayout, list[float]]]()
    for columns in reader:
        if not any(isinstance(text, str) and text.strip() for text in columns.values()):
            continue
        space, layout, seconds = _read(columns)
        model = replace(space.model, tensor_model_parallel_size=1)
        key = (model, space.gpu.name, layout.num_gpus, layout.gbs, space.precision)
        heads.setdefault(key, space)
        times = rows.setdefault(key, {}).setdefault(layout, [])
        times += [] if seconds is None else [seconds]
    medians = {
        key: [(layout, median(times) if times else None) for layout, times in own.items()] for key, own in rows.items()
    }
    return [replace(head, rows=tuple(medians[key])) for key, head in heads.items()]


def _read(columns: Mapping[str, str]) -> tuple[Space, ParallelLayout, float | None]:
    """Return a space that has no rows yet, and a row: layout and seconds."""
    size: dict[str, Any] = {name: _size(columns, name) for name in ("num_gpus", "gbs", "mbs", "seq_length", *_SIZES)}
    etp = _size(columns, "etp") if columns.get("etp", "").strip() else None
    gpu, precision = gpu_named(columns["gpu"].strip()), precision_named(columns.get("precision", "").strip() or "bf16")
    recipe = columns.get("recipe", "").strip()
    if recipe:
        model = architecture(load_recipe(recipe), ResolvedCmdArgs(seq_length=size["seq_length"], tp=size["tp"]))
    else:
        model = _model(columns, size)
    layout = ParallelLayout(**size, etp=etp, precision=precision)
    name = recipe or f"{model.num_layers} layers of {model.hidden_size}"
    if layout.ep > 1 and model.num_moe_experts is None:
        raise BadInput(f"ep: {layout.ep}, but the model ({name}) has no experts; use 1, or a recipe with experts")
    where = f"{name} on {layout.num_gpus} {gpu.name}, batch {layout.gbs} x {layout.seq_length}"
    return Space(where, model, gpu, precision, ()), layout, _seconds(columns["step_time_s"])


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


def read_measurements(paths: Sequence[Path]) -> tuple[dict[str, list[MeasuredPoint]], Counter[str]]:
    """Read runs' directories, report.json files and tables (.csv); BadInput: one cannot be read.

    Return the points by GPU, and how many are left out for each reason.

    Points with equal predictions are merged, also across files: otherwise none could be held out of a fit.
    """
    left_out, alike = Counter[str](), dict[tuple[str, StepGroups], list[MeasuredPoint]]()
    for path in paths:
        is_table = path.suffix.lower() == ".csv"
        for find in _of_table(path, left_out) if is_table else _of_runs(read_results(path), left_out):
            try:
                point = find()
                alike.setdefault((point.gpu, point.groups), []).append(point)
            except BadInput as error:
                left_out[str(error)] += 1
    points = dict[str, list[MeasuredPoint]]()
    for (gpu, _), same in alike.items():
        peaks = [point.peak_over_predicted for point in same if point.peak_over_predicted is not None]
        seconds, peak = median(point.step_time_s for point in same), median(peaks) if peaks else None
        points.setdefault(gpu, []).append(replace(same[0], step_time_s=seconds, peak_over_predicted=peak))
    return points, left_out


def _of_table(path: Path, left_out: Counter[str]) -> Iterator[Callable[[], MeasuredPoint]]:
    for space in read_table(path):
        for layout, seconds in space.rows:
            if seconds is None:
                left_out["it ran out of memory"] += 1
            else:
                yield partial(_row, space, layout, seconds)


def _row(space: Space, layout: ParallelLayout, step_time_s: float) -> MeasuredPoint:
    groups = time_model(space.model_of(layout.tp), space.gpu, space.precision).groups(layout)
    return MeasuredPoint(space.gpu.name, groups, step_time_s)


def _of_runs(runs: Sequence[RunResult], left_out: Counter[str]) -> Iterator[Callable[[], MeasuredPoint]]:
    """Yield the points of a report; repetitions of a point are one."""
    points, headline_of = dict[str, list[RunResult]](), headline_estimator()
    for run in runs:
        if run.is_success:
            points.setdefault(run.comparability_id, []).append(run)
        else:
            left_out[f"its verdict is {run.verdict}"] += 1
    yield from (partial(_point, same, headline_of) for same in points.values())


def _point(runs: Sequence[RunResult], headline_of: Callable[[EstimateRequest], Headline]) -> MeasuredPoint:
    """Return a point of all its runs; BadInput with the reason if it has no prediction."""
    times = [value[0] for run in runs if (value := value_of(METRICS["step_time_s"], run))]
    if not times:
        raise BadInput("it has no step time")
    question = question_of(runs[0])
    assert question.gpu is not None  # else `question_of` raises
    groups = groups_of(question)
    peak = headline_of(question).peak_memory_gib
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
