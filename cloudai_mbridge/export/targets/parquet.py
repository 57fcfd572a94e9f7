"""Parquet: a typed row per run. Missing values are null."""

import io
from collections.abc import Sequence
from typing import Any

from cloudai_mbridge.export import load
from cloudai_mbridge.export.table import ARGUMENTS, METRICS, TIMES, RunTable

IS_BINARY = True
_COUNTS = ("iteration", "num_nodes", "world_size", "runs", "good_runs", "attempts", "step_time_n")


def render(table: RunTable) -> bytes:
    """Return the file. Only the type of an axis depends on the values; all other columns have a fixed type."""
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
    if name in TIMES:
        return pa.timestamp("us", tz="UTC")
    if name in _COUNTS:
        return pa.int64()
    if name in METRICS:
        return pa.float64()
    if name == "pre_test":
        return pa.bool_()
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int} or (name in ARGUMENTS and not kinds):
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.bool_() if kinds == {bool} else pa.string()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
