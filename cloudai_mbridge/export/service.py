"""A row's parameters and metrics for MLflow and W&B, without unknown values."""

from cloudai_mbridge.export.table import ARGUMENTS, METRICS, Row, RunTable

_PARAMETERS = (
    *("scenario", "system", "test", "point", "iteration", *ARGUMENTS),
    *("recipe", "gpu", "dtype", "num_nodes", "world_size"),
)
_RESULTS = ("verdict", "reason", "failure", "job_id", "attempts", "nodes", "memory_kind", "flops_formula")
DEFAULT_NAME = "mbridge"  # of an experiment or project


def parameters(table: RunTable, row: Row) -> dict[str, object]:
    """Return the requested arguments and coordinates."""
    return {name: row[name] for name in (*_PARAMETERS, *table.axes) if row[name] is not None}


def results(row: Row) -> dict[str, object]:
    """Return the results that are not metrics."""
    return {name: row[name] for name in _RESULTS if row[name] is not None}


def metrics(row: Row) -> dict[str, float]:
    """Return the measured metrics."""
    return {name: float(row[name]) for name in METRICS if row[name] is not None}


def name_of(row: Row) -> str:
    """Return the display name: TEST/POINT/ITERATION."""
    return "/".join(str(row[name]) for name in ("test", "point", "iteration") if row[name] is not None)
