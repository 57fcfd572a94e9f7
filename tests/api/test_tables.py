"""Tables of pandas and Arrow: types, what is missing, and a library that is not there."""

import sys
from typing import Any

import pytest

from cloudai_mbridge.api.results import Table
from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.report.rows import axis_types, axis_values, run_columns, run_rows
from cloudai_mbridge.verdict import Verdict
from tests.golden import Sentence
from tests.report.conftest import some_point, some_rejected

COLUMNS = {"name": str, "tp": int, "time": float, "fsdp": bool}
ROWS = ({"name": "a\udc80", "tp": 1, "time": 0.5, "fsdp": True}, {"name": None, "time": float("nan")})


def test_pandas_has_a_type_for_every_column_also_where_a_value_is_missing() -> None:
    pandas = pytest.importorskip("pandas")
    whole, gaps = Table(COLUMNS, ROWS[:1]).to_pandas(), Table(COLUMNS, ROWS).to_pandas()
    assert list(map(str, whole.dtypes)) == ["str", "int64", "float64", "bool"]
    assert list(map(str, gaps.dtypes)) == ["str", "Int64", "float64", "boolean"]
    assert gaps["name"].tolist()[0] == "a\\udc80"
    assert pandas.isna(gaps.iloc[1]).all()


@pytest.mark.parametrize("rows", [(), ROWS], ids=["empty", "rows"])
def test_arrow_has_the_same_schema_whatever_the_rows(rows: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    table = Table(COLUMNS, rows).to_arrow()
    assert table.schema.types == [pa.string(), pa.int64(), pa.float64(), pa.bool_()]
    assert table.num_rows == len(rows)
    if rows:
        assert table.column("tp").to_pylist() == [1, None]


@pytest.mark.parametrize("name", ["pandas", "pyarrow"])
def test_a_library_that_is_missing_is_named_with_the_command_for_it(
    sentence: Sentence, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    table = Table(COLUMNS, ROWS)
    with pytest.raises(ToolFailure) as error:
        _ = table.to_pandas() if name == "pandas" else table.to_arrow()
    sentence(error, python=r"^.* in sys\.modules")
    assert "\n" not in str(error.value)


def test_axes_of_any_type_are_columns() -> None:
    axes: list[dict[str, Any]] = [
        {"tp": 1, "lr": 1, "recompute_modules": ["moe"], "verdict": "x", "fsdp": True, "mixed": 1},
        {"tp": 2, "lr": 0.5, "recompute_modules": "", "mixed": "none"},
    ]
    points = [some_point(label="a", coordinates=axes[0]), some_rejected(label="b", coordinates=axes[1])]
    columns = run_columns(points)
    of_axes = {"tp": int, "lr": float, "recompute_modules": str, "axis.verdict": str, "fsdp": bool, "mixed": str}
    assert of_axes.items() <= columns.items()
    arrow = Table(columns, tuple(run_rows(points)))
    assert arrow.rows[0]["recompute_modules"] == '["moe"]'
    pytest.importorskip("pyarrow")
    assert arrow.to_arrow().column("mixed").to_pylist() == ["1", "none"]
    assert axis_types([], columns) == axis_values({}, columns) == {}


@pytest.mark.parametrize(("times", "hours"), [((1800.0, 1800.0), 2.0), ((1800.0, None), None)])
def test_gpu_hours_are_of_all_attempts_or_not_known(times: Any, hours: float | None) -> None:
    (row,) = run_rows([some_point(attempts=tuple({"run_time_s": time} for time in times))])
    assert row["gpu_hours"] == hours


def test_what_was_not_measured_is_missing_in_a_row() -> None:
    failed = some_point(Verdict.FAILED, metrics=None, reasons=("a", "b"), failure={"id": "out_of_memory"})
    (good, bad, rejected) = run_rows([some_point(job={"job_id": "17"}), failed, some_rejected()])
    assert (good["step_time_mean_s"], good["step_time_n"], good["job_id"]) == (3.5, 2, "17")
    assert bad["reason"] == "a; b"
    assert bad["failure"] == "out_of_memory"
    assert not {"step_time_mean_s", "last_loss"} & bad.keys()
    assert bad["gpu_hours"] == 0.0
    assert rejected["iteration"] is None
    assert rejected["verdict"] == "rejected"
    assert rejected["reason"].startswith("C04 ")
