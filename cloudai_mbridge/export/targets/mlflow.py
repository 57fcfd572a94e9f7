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
    tracking = load("mlflow.tracking", _PACKAGE)
    with errors_of("mlflow", "mlflow"):
        return _Export(tracking.MlflowClient(), table).write()


class _Export:
    def __init__(self, client: Any, table: RunTable) -> None:
        self._client, self._table = client, table
        self._name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_NAME
        found = client.get_experiment_by_name(self._name)
        self._experiment = str(client.create_experiment(self._name) if found is None else found.experiment_id)

    def write(self) -> str:
        parent = self._parent()
        written = sum(self._child(row, parent) for row in self._table.ran)
        same = len(self._table.ran) - written
        where = f"experiment {self._name!r} at {redacted(self._client.tracking_uri)}"
        unchanged = f", {same} were there already" if same else ""
        return f"mlflow: {counted(written, 'run')} written{unchanged}; {where}"

    def _parent(self) -> str:
        """Return the parent run; its tags are from this export."""
        table = self._table
        found = self._find(table.id_of())
        run_id = found[0].info.run_id if found else self._create(table.id_of(), table.run, table.reported_at)
        counts = Counter(str(row["verdict"]) for row in table.ran)
        tags = {"scenario": table.scenario, "system": table.system, **{name: str(n) for name, n in counts.items()}}
        for name, value in tags.items():
            self._client.set_tag(run_id, f"mbridge.{name}", value)
        self._client.set_terminated(run_id, "FINISHED", _milliseconds(table.reported_at))
        return str(run_id)

    def _child(self, row: Row, parent: str) -> bool:
        """Write a row; return False if it already exists."""
        contents = digest(parent, *row.items())
        for run in (found := self._find(self._table.id_of(row))):
            if run.data.tags.get(_DIGEST) == contents and len(found) == 1:
                return False
            self._client.delete_run(run.info.run_id)
        entities = load("mlflow.entities", _PACKAGE)
        end = row["ended_at"] or self._table.reported_at
        start = row["started_at"] or end
        run_id = self._create(self._table.id_of(row), name_of(row), start, {_PARENT: parent})
        asked = {name: str(value)[:_LONGEST_VALUE] for name, value in parameters(self._table, row).items()}
        self._client.log_batch(
            run_id,
            [entities.Metric(name, value, _milliseconds(end), 0) for name, value in metrics(row).items()],
            [entities.Param(name, value) for name, value in asked.items()],
            [entities.RunTag(f"mbridge.{name}", str(value)) for name, value in results(row).items()],
        )
        self._client.set_terminated(run_id, _STATUS.get(row["verdict"], "KILLED"), _milliseconds(end))
        self._client.set_tag(run_id, _DIGEST, contents)  # last: without it, a run is incomplete
        return True

    def _find(self, own_id: str) -> list[Any]:
        return list(self._client.search_runs([self._experiment], f"tags.`{_ID}` = '{own_id}'"))

    def _create(self, own_id: str, name: str, start: datetime, tags: dict[str, str] | None = None) -> str:
        about = {_ID: own_id, "mlflow.source.name": "mbridge export", **(tags or {})}
        made = self._client.create_run(self._experiment, _milliseconds(start), about, run_name=name)
        return str(made.info.run_id)


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
