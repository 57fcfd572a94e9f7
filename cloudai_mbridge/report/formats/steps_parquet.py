"""steps.parquet: the table of steps.csv with its types. It needs the `parquet` extra, and is left out without it."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.replace import replacing
from cloudai_mbridge.report.formats.step_rows import COLUMNS, NUMBERS, TEXTS, step_rows
from cloudai_mbridge.report.model import PointReport

_ROWS_AT_A_TIME = 1 << 16


def write_steps_parquet(points: Iterable[PointReport], path: Path) -> bool:
    """Write the rows in groups: memory does not grow with their number. Return whether pyarrow was there to do it.

    A missing number is null, one that is not finite is itself. Without pyarrow an older file is removed, since it would
    be of another report.
    """
    try:
        pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        path.unlink(missing_ok=True)
        return False
    schema = pa.schema([(name, _type(pa, name)) for name in COLUMNS])
    with replacing(path) as unfinished, parquet.ParquetWriter(str(unfinished), schema, compression="zstd") as file:
        for rows in _groups(step_rows(points)):
            columns = zip(*rows, strict=True)
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            file.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return True


def _type(pa: Any, name: str) -> Any:
    """Return a column's type. Names repeat, so they are stored once."""
    if name in TEXTS:
        return pa.dictionary(pa.int32(), pa.string())
    return pa.float64() if name in NUMBERS else pa.bool_() if name == "counted" else pa.int64()


def _groups(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    while group := [tuple(map(_value, row)) for row in islice(rows, _ROWS_AT_A_TIME)]:
        yield group


def _value(value: Any) -> Any:
    """Return a value that Arrow takes: a text with a lone surrogate is none."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", errors="backslashreplace").decode()
