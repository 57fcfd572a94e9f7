"""Rows of a report: one for every run and rejected point, and one for every step, as steps.csv and steps.parquet.

In steps.csv, a missing number is an empty cell; a number that is not finite is nan, inf or -inf. A text that begins
like a formula (with =, +, -, @ or a tab) gets an apostrophe in front, since spreadsheets run formulas; take it off
before comparing names with report.json. Control characters other than tabs and line feeds are escaped, such as \\x0d.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.replace import replacing
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import MEASURES, Metrics, Statistic
from cloudai_mbridge.report.columns import API_COLUMNS, MEASURE_COLUMNS, columns_with
from cloudai_mbridge.report.model import PointReport
from cloudai_mbridge.report.ranking import gpu_hours
from cloudai_mbridge.verdict import Verdict


def run_columns(points: Iterable[PointReport]) -> dict[str, type]:
    """Return the columns of `run_rows` with their types. Every axis of any test is a column."""
    return columns_with(axis_types((point.coordinates for point in points), API_COLUMNS), API_COLUMNS)


def run_rows(points: Iterable[PointReport]) -> Iterator[dict[str, Any]]:
    """Yield a row per run and rejected point, in order. Unknown values are None, or left out.

    step_time_n: number of steps after the warm-up, the base of the statistics. gpu_hours: of all attempts.
    """
    for point in points:
        axes = axis_values(point.coordinates, API_COLUMNS)
        is_known = point.world_size and all(attempt.get("run_time_s") is not None for attempt in point.attempts)
        hours = gpu_hours([point]) if is_known else None
        yield {**run_cells(point), **axes, **measure_cells(point.metrics), "gpu_hours": hours}


def run_cells(point: PointReport) -> dict[str, Any]:
    """Return the cells of a run or a rejected point without axes and measures, for every table of runs."""
    is_run = point.verdict is not Verdict.REJECTED
    return {
        **{"test": point.test_id, "point": point.label, "iteration": point.iteration if is_run else None},
        **{"num_nodes": point.num_nodes, "world_size": point.world_size},
        **{"verdict": str(point.verdict), "reason": "; ".join(point.reasons)},
        **{"failure": (point.failure or {}).get("id"), "job_id": point.job.get("job_id")},
    }


def measure_cells(metrics: Metrics | None) -> dict[str, Any]:
    """Return the numbers of a run by column; a missing statistic has none."""
    if metrics is None:
        return {}
    values = {measure: getattr(metrics, measure.name) for measure in MEASURES}
    return {
        column: number_of(values[measure], number) if number else values[measure]
        for column, (measure, number) in MEASURE_COLUMNS.items()
    }


def number_of(statistic: Statistic | None, number: str) -> float | None:
    """Return a number of a statistic by its name, None if unknown: a single step or run has no spread."""
    if statistic is None or (number == "capped_std" and statistic.n < 2):
        return None
    value: float = getattr(statistic, number)
    return value


def axis_types(coordinates: Iterable[Mapping[str, Any]], taken: Iterable[str]) -> dict[str, type]:
    """Return the columns of axes: bool, int or float if all values have that type, else str."""
    kinds: dict[str, set[type]] = {}
    for point in coordinates:
        for name, value in axis_values(point, taken).items():
            kinds.setdefault(name, set()).add(type(value))
    found = {name: types - {type(None)} for name, types in kinds.items()}
    return {
        name: next(iter(types)) if len(types) == 1 else float if types == {int, float} else str
        for name, types in found.items()
    }


def axis_values(coordinates: Mapping[str, Any], taken: Iterable[str]) -> dict[str, Any]:
    """Return a point's coordinates by column. Lists and tables are JSON; the name of a `taken` column gets `axis.`."""
    return {
        f"axis.{name}" if name in taken else name: json.dumps(value) if isinstance(value, list | dict) else value
        for name, value in coordinates.items()
    }


_FORMULA = ("=", "+", "-", "@", "\t")


def write_steps_csv(points: Iterable[PointReport], path: Path) -> None:
    """Write the rows one by one: memory does not grow with their number."""

    def cell(value: Any) -> Any:
        if isinstance(value, bool):
            return "true" if value else "false"
        return spreadsheet_text(value) if isinstance(value, str) else value

    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(STEP_COLUMNS)
        rows.writerows(map(cell, row) for row in step_rows(points))


@lru_cache(maxsize=16)  # a run's names are the same in all its rows
def spreadsheet_text(text: str) -> str:
    """Return a text as a cell that a spreadsheet does not read as a formula."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


_NUMBERS = tuple(each.name for each in fields(StepRecord) if each.name not in ("step", "left_out"))
STEP_COLUMNS: Mapping[str, type] = {
    **{"key": str, "test_id": str, "label": str, "iteration": int, "verdict": str, "step": int, "counted": bool},
    **dict.fromkeys(_NUMBERS, float),
}


def step_rows(points: Iterable[PointReport]) -> Iterator[tuple[Any, ...]]:
    """Yield the steps of all runs, in order, one at a time. counted: in the statistics."""
    for point in points:
        warmup = point.metrics.warmup_steps if point.metrics else 0
        head = (point.key, point.test_id, point.label, point.iteration, str(point.verdict))
        for step in point.steps:
            numbers = (getattr(step, name) for name in _NUMBERS)
            yield *head, step.step, step.step > warmup and not step.left_out, *numbers


_ROWS_AT_A_TIME = 1 << 16


def write_steps_parquet(points: Iterable[PointReport], path: Path) -> bool:
    """Write the rows in groups: memory does not grow with their number. Return whether pyarrow is installed.

    A missing number is null; numbers that are not finite are written unchanged. Without pyarrow, an older file is
    removed, since it would belong to another report.
    """
    try:
        pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        path.unlink(missing_ok=True)
        return False
    names = pa.dictionary(pa.int32(), pa.string())  # they repeat, so they are stored once
    types = {str: names, int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in STEP_COLUMNS.items()])
    with replacing(path) as unfinished, parquet.ParquetWriter(str(unfinished), schema, compression="zstd") as file:
        steps = (tuple(map(_value, row)) for row in step_rows(points))
        while rows := list(islice(steps, _ROWS_AT_A_TIME)):
            columns = zip(*rows, strict=True)
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            file.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return True


def _value(value: Any) -> Any:
    """Return a value that Arrow accepts: lone surrogates in a text are escaped."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", errors="backslashreplace").decode()
