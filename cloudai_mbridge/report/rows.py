"""A report as rows, one for every run of a point and every rejected point."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloudai_mbridge.report.model import PointReport
from cloudai_mbridge.report.ranking import gpu_hours
from cloudai_mbridge.verdict import Verdict

# Columns with their types; the axes are between them
_NAMES = {"test": str, "point": str, "iteration": int}
_FOUND = {
    **{"num_nodes": int, "world_size": int, "verdict": str, "reason": str, "failure": str},
    **{"step_time_mean_s": float, "step_time_std_s": float, "step_time_n": int},
    **{"tflops_per_gpu_mean": float, "tokens_per_s_per_gpu_mean": float, "last_loss": float, "peak_memory_gib": float},
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
        is_run = point.verdict is not Verdict.REJECTED
        yield {
            **{"test": point.test_id, "point": point.label, "iteration": point.iteration if is_run else None},
            **axis_values(point.coordinates, _NAMES | _FOUND),
            **{"num_nodes": point.num_nodes, "world_size": point.world_size},
            **{"verdict": str(point.verdict), "reason": "; ".join(point.reasons)},
            "failure": point.failure["id"] if point.failure else None,
            **_measured(point),
            "gpu_hours": _gpu_hours(point),
            "job_id": point.job.get("job_id"),
        }


def _measured(point: PointReport) -> dict[str, Any]:
    if (metrics := point.metrics) is None:
        return {}
    time, flops, tokens = metrics.step_time_s, metrics.tflops_per_gpu, metrics.tokens_per_s_per_gpu
    return {
        **({"step_time_mean_s": time.mean, "step_time_std_s": time.std, "step_time_n": time.n} if time else {}),
        "tflops_per_gpu_mean": flops.mean if flops else None,
        "tokens_per_s_per_gpu_mean": tokens.mean if tokens else None,
        "last_loss": metrics.last_loss,
        "peak_memory_gib": metrics.peak_memory_gib,
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
