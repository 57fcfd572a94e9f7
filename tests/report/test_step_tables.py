"""steps.csv and steps.parquet: the same rows, all of them, in bounded memory."""

import csv
import math
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.report import rows as tables
from cloudai_mbridge.report.model import PointReport
from cloudai_mbridge.report.rows import write_steps_csv, write_steps_parquet
from tests.cases import every
from tests.report.conftest import NASTY, some_point, some_rejected

HEADER = ["key", "test_id", "label", "iteration", "verdict", "step", "counted"]
HEADER += ["step_time_s", "tflops_per_gpu", "loss", "grad_norm", "peak_memory_gib"]


def _read(points: Any, path: Path) -> list[dict[str, str]]:
    write_steps_csv(points, path)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _odd() -> PointReport:
    steps = (
        StepRecord(1, 0.1 + 0.2, math.inf, math.nan, None, None),
        StepRecord(3, None, -math.inf, -5.0, 0.0, 1e-300),
    )
    return some_point(label="odd", steps=steps, metrics=measure(steps, 1, None))


def test_the_rows(tmp_path: Path) -> None:
    rows = _read([some_point(), some_rejected(), _odd()], tmp_path / "steps.csv")
    assert list(rows[0]) == HEADER
    assert len(rows) == 6
    assert list(rows[2].values())[:7] == ["sweep/tp1/0", "sweep", "tp1", "0", "success", "3", "true"]
    assert list(rows[2].values())[7:] == ["3.0", "30.0", "4.0", "0.5", "1.5"]
    assert [row["counted"] for row in rows] == ["false", "false", "true", "true", "false", "true"]
    assert list(rows[4].values())[7:] == ["0.30000000000000004", "inf", "nan", "", ""]
    assert list(rows[5].values())[5:] == ["3", "true", "", "-inf", "-5.0", "0.0", "1e-300"]


@every(
    "label, cell",
    [
        *((name, f"'{name}" if name[0] in "=+-@" else name) for name in NASTY),
        *((f"{start}cmd|' /C calc'!A0", f"'{start}cmd|' /C calc'!A0") for start in "=+-@\t"),
        ("\r=1\r\nx", "\\x0d=1\\x0d\nx"),
        ("\ud800", "\\ud800"),
    ],
)
def test_no_text_is_a_formula_or_ends_its_row(label: str, cell: str, tmp_path: Path) -> None:
    rows = _read([some_point(label=label, test_id=label)], tmp_path / "steps.csv")
    assert [(row["label"], row["test_id"]) for row in rows] == [(cell, cell)] * 4


def test_parquet_has_the_same_rows_with_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    points = [some_point(), _odd(), *(some_point(label=name) for name in (*NASTY, "\ud800"))]
    assert write_steps_parquet(points, tmp_path / "steps.parquet")
    table = parquet.read_table(tmp_path / "steps.parquet")
    assert table.column_names == HEADER
    types = {str(field.type) for field in table.schema if field.name.endswith(("_s", "_gpu", "loss", "norm", "_gib"))}
    assert types == {"double"}
    rows = table.to_pylist()
    assert len(rows) == sum(len(point.steps) for point in points)
    odd = rows[4]
    assert (odd["step_time_s"], odd["tflops_per_gpu"], odd["grad_norm"]) == (0.1 + 0.2, math.inf, None)
    assert math.isnan(odd["loss"])
    assert (odd["counted"], odd["step"]) == (False, 1)
    assert {row["label"] for row in rows} >= set(NASTY)


def test_parquet_of_nothing(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert write_steps_parquet([], tmp_path / "steps.parquet")
    assert parquet.read_table(tmp_path / "steps.parquet").num_rows == 0


def test_without_pyarrow_there_is_no_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "steps.parquet"
    path.write_text("of an older report")
    assert not write_steps_parquet([some_point()], path)
    assert not path.exists()


@pytest.mark.parametrize("write", [write_steps_csv, write_steps_parquet])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if write is write_steps_parquet:
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables, "_ROWS_AT_A_TIME", 1 << 10)
    point = some_point(num_steps=1000)

    def many() -> Iterator[PointReport]:
        yield from (point for _ in range(50))

    write([point], tmp_path / "first")  # imports
    tracemalloc.start()
    try:
        write(many(), tmp_path / "steps")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * (1 << 20)  # the rows are more than 10 times as much


@pytest.mark.parametrize("write", [write_steps_csv, write_steps_parquet])
def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, write: Any) -> None:
    if write is write_steps_parquet:
        pytest.importorskip("pyarrow")
    path = tmp_path / "steps"
    path.write_text("old")

    def broken() -> Iterator[PointReport]:
        yield some_point()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write(broken(), path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["steps"]
