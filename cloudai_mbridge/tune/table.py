"""A table of measured layouts: a row each, and rows of one model, batch and number of GPUs are a space.

Rows of one layout are measurements of it: their median counts. If one of them did not run out of memory, it fits.

Columns: gpu, num_gpus, gbs, mbs, seq_length, tp, pp, cp, vp, ep, step_time_s (seconds, or "oom"), and either recipe, or
num_layers, hidden_size, num_attention_heads, num_query_groups, ffn_hidden_size and vocab_size. etp and precision may be
given; they are tp and bf16 otherwise.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Gpu, gpu_named
from cloudai_mbridge.estimate.memory import ParallelLayout
from cloudai_mbridge.estimate.precision import Precision, precision_named
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe

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
