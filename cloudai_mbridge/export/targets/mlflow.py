"""MLflow: a run for each run of a point, under a parent run. MLFLOW_TRACKING_URI sets the destination.

On repeated export, an equal existing run is kept; a different or incomplete run is replaced.
"""

import os
from collections import Counter
from datetime import datetime
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.export import errors_of, load
from cloudai_mbridge.export.table import DEFAULT_NAME, Row, RunTable, digest, metrics, name_of, parameters, results
from cloudai_mbridge.training.credentials.scrub import redacted

_PACKAGE = "mlflow-skinny"
_ID, _DIGEST, _PARENT = "mbridge.id", "mbridge.digest", "mlflow.parentRunId"
_LONGEST_VALUE = 500  # the limit that every MLflow server accepts
_STATUS = {"success": "FINISHED", "failed": "FAILED"}


def send(table: RunTable) -> str:
    """Write the runs and return their number as text. ToolFailure: the server or store refuses them."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its own 7 take minutes where nothing listens
    tracking = load("mlflow.tracking", _PACKAGE)
    with errors_of("mlflow", "mlflow"):
        client, name = tracking.MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_NAME
        found = client.get_experiment_by_name(name)
        experiment = str(client.create_experiment(name) if found is None else found.experiment_id)
        parent = _write_parent(client, experiment, table)
        written = sum(_write_child(client, experiment, table, row, parent) for row in table.ran)
        same = len(table.ran) - written
        unchanged = f", {same} were there already" if same else ""
        where = f"experiment {name!r} at {redacted(client.tracking_uri)}"
        return f"mlflow: {counted(written, 'run')} written{unchanged}; {where}"


def _write_parent(client: Any, experiment: str, table: RunTable) -> str:
    """Return the parent run; its tags are from this export."""
    found = _find(client, experiment, table.id_of())
    run_id = found[0].info.run_id if found else _create(client, experiment, table.id_of(), table.run, table.reported_at)
    counts = Counter(str(row["verdict"]) for row in table.ran)
    tags = {"scenario": table.scenario, "system": table.system, **{name: str(n) for name, n in counts.items()}}
    for name, value in tags.items():
        client.set_tag(run_id, f"mbridge.{name}", value)
    client.set_terminated(run_id, "FINISHED", _milliseconds(table.reported_at))
    return str(run_id)


def _write_child(client: Any, experiment: str, table: RunTable, row: Row, parent: str) -> bool:
    """Write a row; return False if it already exists."""
    contents = digest(parent, *row.items())
    for run in (found := _find(client, experiment, table.id_of(row))):
        if run.data.tags.get(_DIGEST) == contents and len(found) == 1:
            return False
        client.delete_run(run.info.run_id)
    entities = load("mlflow.entities", _PACKAGE)
    end = row["ended_at"] or table.reported_at
    start = row["started_at"] or end
    run_id = _create(client, experiment, table.id_of(row), name_of(row), start, {_PARENT: parent})
    asked = {name: str(value)[:_LONGEST_VALUE] for name, value in parameters(table, row).items()}
    client.log_batch(
        run_id,
        [entities.Metric(name, value, _milliseconds(end), 0) for name, value in metrics(row).items()],
        [entities.Param(name, value) for name, value in asked.items()],
        [entities.RunTag(f"mbridge.{name}", str(value)) for name, value in results(row).items()],
    )
    client.set_terminated(run_id, _STATUS.get(row["verdict"], "KILLED"), _milliseconds(end))
    client.set_tag(run_id, _DIGEST, contents)  # last: without it, a run is incomplete
    return True


def _find(client: Any, experiment: str, own_id: str) -> list[Any]:
    return list(client.search_runs([experiment], f"tags.`{_ID}` = '{own_id}'"))


def _create(
    client: Any, experiment: str, own_id: str, name: str, start: datetime, tags: dict[str, str] | None = None
) -> str:
    about = {_ID: own_id, "mlflow.source.name": "mbridge export", **(tags or {})}
    made = client.create_run(experiment, _milliseconds(start), about, run_name=name)
    return str(made.info.run_id)


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
