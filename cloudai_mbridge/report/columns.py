"""Columns of every table of runs, in order, with their types: the Python API's tables have some, exports have all.

The columns of axes, and an export's of arguments, come after the names of a run; their types depend on the values.
"""

from collections.abc import Container, Mapping
from datetime import datetime

from cloudai_mbridge.metrics import MEASURES, Measure

# Column of a measure -> the measure, and the number of its statistic
MEASURE_COLUMNS: Mapping[str, tuple[Measure, str]] = {
    column: (measure, number) for measure in MEASURES for number, column in measure.columns.items()
}
ARGUMENTS = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length")
METRICS: Mapping[str, type] = {
    **{column: int if number == "n" else float for column, (_, number) in MEASURE_COLUMNS.items()},
    "gpu_hours": float,
}
_NAMES = {"run": str, "scenario": str, "system": str, "test": str, "point": str, "iteration": int}
_FOUND = {
    **{"recipe": str, "gpu": str, "dtype": str, "num_nodes": int, "world_size": int},
    **{"verdict": str, "reason": str, "failure": str, "runs": int, "good_runs": int},
    **METRICS,
    **{"memory_kind": str, "flops_formula": str, "comparability": str, "job_id": str, "attempts": int, "nodes": str},
    **{"started_at": datetime, "ended_at": datetime, "pre_test": bool},
}
COLUMNS: Mapping[str, type] = _NAMES | _FOUND
API_COLUMNS = (
    *("test", "point", "iteration", "num_nodes", "world_size", "verdict", "reason", "failure", *METRICS),
    "job_id",
)


def columns_with(axes: Mapping[str, type], wanted: Container[str] = COLUMNS) -> dict[str, type]:
    """Return the columns that are wanted, and those of axes, with their types."""
    names, found = ({name: kind for name, kind in part.items() if name in wanted} for part in (_NAMES, _FOUND))
    return {**names, **axes, **found}
