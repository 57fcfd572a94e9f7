"""steps.csv and steps.parquet: every step of every run, a row each.

In the CSV, a missing number is an empty cell; a number that is not finite is nan, inf or -inf. A text that begins
like a formula (with =, +, -, @ or a tab) gets an apostrophe in front, since spreadsheets run formulas; take it off
before comparing names with report.json. Control characters other than tabs and line feeds are escaped, such as \\x0d.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.replace import replacing
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.report.model import PointReport

_FORMULA = ("=", "+", "-", "@", "\t")


def write_steps_csv(points: Iterable[PointReport], path: Path) -> None:
    """Write the rows one by one: memory does not grow with their number."""
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows(map(_cell, row) for row in step_rows(points))


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return spreadsheet_text(value) if isinstance(value, str) else value


@lru_cache(maxsize=16)  # a run's names are the same in all its rows
def spreadsheet_text(text: str) -> str:
    """Return a text as a cell that a spreadsheet does not read as a formula."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


TEXTS = ("key", "test_id", "label", "verdict")
NUMBERS = tuple(each.name for each in fields(StepRecord) if each.name != "step")
COLUMNS = ("key", "test_id", "label", "iteration", "verdict", "step", "counted", *NUMBERS)


def step_rows(points: Iterable[PointReport]) -> Iterator[tuple[Any, ...]]:
    """Yield the steps of all runs, in order, one at a time. counted: after the warm-up, and in the statistics."""
    for point in points:
        warmup = point.metrics.warmup_steps if point.metrics else 0
        head = (point.key, point.test_id, point.label, point.iteration, str(point.verdict))
        for step in point.steps:
            numbers = (getattr(step, name) for name in NUMBERS)
            yield *head, step.step, step.step > warmup, *numbers


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
    schema = pa.schema([(name, _type(pa, name)) for name in COLUMNS])
    with replacing(path) as unfinished, parquet.ParquetWriter(str(unfinished), schema, compression="zstd") as file:
        steps = (tuple(map(_value, row)) for row in step_rows(points))
        while rows := list(islice(steps, _ROWS_AT_A_TIME)):
            columns = zip(*rows, strict=True)
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            file.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return True


def _type(pa: Any, name: str) -> Any:
    """Return a column's type. Names repeat, so they are stored once."""
    if name in TEXTS:
        return pa.dictionary(pa.int32(), pa.string())
    return pa.float64() if name in NUMBERS else pa.bool_() if name == "counted" else pa.int64()


def _value(value: Any) -> Any:
    """Return a value that Arrow accepts: lone surrogates in a text are escaped."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", errors="backslashreplace").decode()
