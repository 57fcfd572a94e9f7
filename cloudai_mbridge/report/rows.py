"""A report as rows, one for every run of a point and every rejected point."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloudai_mbridge.metrics import MEASURES, Measure, Metrics
from cloudai_mbridge.report.model import PointReport
from cloudai_mbridge.report.ranking import gpu_hours
from cloudai_mbridge.verdict import Verdict

# Column of a measure -> the measure, and the number of its statistic
MEASURE_COLUMNS: Mapping[str, tuple[Measure, str]] = {
    column: (measure, number) for measure in MEASURES for number, column in measure.columns.items()
}
# Columns with their types; the axes are between them
_NAMES = {"test": str, "point": str, "iteration": int}
_FOUND = {
    **{"num_nodes": int, "world_size": int, "verdict": str, "reason": str, "failure": str},
    **{column: int if number == "n" else float for column, (_, number) in MEASURE_COLUMNS.items()},
    **{"gpu_hours": float, "job_id": str},
}


def run_columns(points: Iterable[PointReport]) -> dict[str, type]:
    """Return the columns of `run_rows` with their types. Every axis of any test is a column."""
    return {**_NAMES, **axis_types((point.coordinates for point in points), _NAMES | _FOUND), **_FOUND}


def run_rows(points: Iterable[PointReport]) -> Iterator[dict[str, Any]]:
    """Yield a row per run and rejected point, in order. Unknown values are None, or left out.

    step_time_n: number of steps after the warm-up, the base of the statistics. gpu_hours: of all attempts.
    """
    for point in points:
        axes = axis_values(point.coordinates, _NAMES | _FOUND)
        yield {**run_cells(point), **axes, **measure_cells(point.metrics), "gpu_hours": _gpu_hours(point)}


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
        column: getattr(values[measure], number, None) if number else values[measure]
        for column, (measure, number) in MEASURE_COLUMNS.items()
    }


def _gpu_hours(point: PointReport) -> float | None:
    is_known = point.world_size and all(attempt.get("run_time_s") is not None for attempt in point.attempts)
    return gpu_hours([point]) if is_known else None


def axis_types(coordinates: Iterable[Mapping[str, Any]], taken: Iterable[str]) -> dict[str, type]:
    """Return the columns of axes: bool, int or float if all values have that type, else str."""
    kinds: dict[str, set[type]] = {}
    for point in coordinates:
        for name, value in axis_values(point, taken).items():
            kinds.setdefault(name, set()).add(type(value))
    return {name: _common(found - {type(None)}) for name, found in kinds.items()}


def _common(kinds: set[type]) -> type:
    if len(kinds) == 1:
        return next(iter(kinds))
    return float if kinds and kinds <= {int, float} else str


def axis_values(coordinates: Mapping[str, Any], taken: Iterable[str]) -> dict[str, Any]:
    """Return a point's coordinates by column. Lists and tables are JSON; the name of a `taken` column gets `axis.`."""
    return {
        f"axis.{name}" if name in taken else name: json.dumps(value) if isinstance(value, list | dict) else value
        for name, value in coordinates.items()
    }
