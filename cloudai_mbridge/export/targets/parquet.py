"""Parquet: a typed row per run. Missing values are null."""

import io
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from cloudai_mbridge.export import load
from cloudai_mbridge.export.table import RunTable
from cloudai_mbridge.report.columns import ARGUMENTS, COLUMNS

IS_BINARY = True


def render(table: RunTable) -> bytes:
    """Return the file. Only the types of axes and arguments depend on the values."""
    pa, parquet = load("pyarrow", "pyarrow"), load("pyarrow.parquet", "pyarrow")
    columns = {name: [row[name] for row in table.rows] for name in table.columns}
    types = {name: _type(pa, name, values) for name, values in columns.items()}
    arrays = {
        name: pa.array(list(map(_text, values)) if types[name] == pa.string() else values, type=types[name])
        for name, values in columns.items()
    }
    file = io.BytesIO()
    parquet.write_table(pa.table(arrays), file, compression="zstd")
    return file.getvalue()


def _type(pa: Any, name: str, values: Sequence[Any]) -> Any:
    if name in COLUMNS:
        plain = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
        return {**plain, datetime: pa.timestamp("us", tz="UTC")}[COLUMNS[name]]
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int} or (name in ARGUMENTS and not kinds):
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.bool_() if kinds == {bool} else pa.string()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
