"""What MLflow and W&B are given of a row: parameters and metrics, none of them where something is not known."""

from cloudai_mbridge.export.table import ARGUMENTS, METRICS, Row, RunTable

_PARAMETERS = (
    *("scenario", "system", "test", "point", "iteration", *ARGUMENTS),
    *("recipe", "gpu", "dtype", "num_nodes", "world_size"),
)
_RESULTS = ("verdict", "reason", "failure", "job_id", "attempts", "nodes", "memory_kind", "flops_formula")
DEFAULT_NAME = "mbridge"  # of an experiment or project


def parameters(table: RunTable, row: Row) -> dict[str, object]:
    """Return what was asked for."""
    return {name: row[name] for name in (*_PARAMETERS, *table.axes) if row[name] is not None}


def results(row: Row) -> dict[str, object]:
    """Return what was found and is not a metric."""
    return {name: row[name] for name in _RESULTS if row[name] is not None}


def metrics(row: Row) -> dict[str, float]:
    """Return what was measured."""
    return {name: float(row[name]) for name in METRICS if row[name] is not None}


def name_of(row: Row) -> str:
    """Return the name that people see: TEST/POINT/ITERATION."""
    return "/".join(str(row[name]) for name in ("test", "point", "iteration") if row[name] is not None)
