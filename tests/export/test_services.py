"""`mbridge export` to services: read back by MLflow's client, from W&B's own file, and by a server that takes OTLP."""

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import FAILED, NAME, TIMES, Run, change, points
from tests.http_server import Request, serving

pytestmark = pytest.mark.process
SECRET = "hunter22-not-to-be-seen"


# MLflow


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return a client of the store that the command writes to, and makes."""
    pytest.importorskip("sqlalchemy")
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return lambda: tracking.MlflowClient(uri)


def runs_of(client: Any) -> tuple[Any, dict[str, Any]]:
    """Return the run that stands for the whole, and those below it by name."""
    (experiment,) = [each for each in client.search_experiments() if each.name == "mbridge"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} <= {parent.info.run_id}
    names = {run.info.run_name: run for run in children}
    assert len(names) == len(children), "no run is there twice"
    return parent, names


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_a_run_for_each_run(finished: Path, mbridge_here: Run, mlflow_store: Callable[[], Any]) -> None:
    code, out, err = mbridge_here("export", finished, "--to", "mlflow")
    assert (code, out.partition(" at ")[0]) == (0, "mlflow: 4 runs written; experiment 'mbridge'")
    parent, runs = runs_of(mlflow_store())
    assert parent.info.run_name == NAME
    assert (parent.data.tags["mbridge.success"], parent.data.tags["mbridge.failed"]) == ("3", "1")
    assert set(runs) == {*TIMES, FAILED}
    for key, time in TIMES.items():
        run, point = runs[key], points(finished)[key]
        assert run.info.status == "FINISHED"
        assert run.data.metrics["step_time_mean_s"] == time
        assert run.data.metrics["last_loss"] == point["metrics"]["last_loss"]
        assert (run.data.params["mb"], run.data.params["recipe"]) == (point["label"][2:], "gpt_tiny")
        assert run.data.tags["mbridge.job_id"] == "17"
    assert "peak_memory_gib" not in runs["t/mb2/0"].data.metrics
    assert (runs[FAILED].info.status, runs[FAILED].data.metrics) == ("FAILED", {})
    assert err == ""


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_what_is_equal_and_replaces_what_differs(
    finished: Path, mbridge_here: Run, mlflow_store: Callable[[], Any]
) -> None:
    mbridge_here("export", finished, "--to", "mlflow")
    before = {name: run.info.run_id for name, run in runs_of(mlflow_store())[1].items()}
    assert "mlflow: 0 runs written, 4 were there already" in mbridge_here("export", finished, "--to", "mlflow")[1]
    assert {name: run.info.run_id for name, run in runs_of(mlflow_store())[1].items()} == before
    change(finished, "t/mb1/0", verdict="failed", metrics=None)
    mlflow_store().delete_tag(before["t/mb1/1"], "mbridge.digest")  # as after an export that was killed
    assert "mlflow: 2 runs written, 2 were there already" in mbridge_here("export", finished, "--to", "mlflow")[1]
    runs = runs_of(mlflow_store())[1]
    assert {name for name, run in runs.items() if run.info.run_id == before[name]} == {"t/mb2/0", FAILED}
    assert (runs["t/mb1/0"].info.status, runs["t/mb1/0"].data.metrics) == ("FAILED", {"gpu_hours": 0.02})
    assert runs["t/mb1/1"].data.metrics["step_time_mean_s"] == 0.25


@pytest.mark.filterwarnings("ignore")
def test_where_nothing_listens_it_ends_soon(finished: Path, mbridge_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    with serving(lambda request: (200, b"")) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    code, out, err = mbridge_here("export", finished, "--to", "mlflow")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2", "MLflow's own 7 retries take minutes"


@pytest.mark.filterwarnings("ignore")
def test_an_answer_that_repeats_the_token_does_not_show_it(
    finished: Path, mbridge_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")

    def refuse(request: Request) -> tuple[int, bytes]:
        said = {"error_code": "PERMISSION_DENIED", "message": f"no: {request.headers.get('authorization')}"}
        return 403, json.dumps(said).encode()

    with serving(refuse) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
        code, out, err = mbridge_here("export", finished, "--to", "mlflow")
    assert server.requests[0].headers["authorization"] == f"Bearer {SECRET}", "the token comes from MLflow's variable"
    assert (code, out) == (3, "")
    assert err.startswith("error: mlflow: PERMISSION_DENIED: no: ")
    assert err.count("\n") == 1
    assert SECRET not in err


# W&B


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: the format of LevelDB's logs, behind a head of seven bytes."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, position, parts = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position < len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield protocol.Record.FromString(parts)
            parts = b""


def wandb_run(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"config": {}, "summary": {}}
    for record in wandb_records(path):
        if record.HasField("run"):
            found |= {name: getattr(record.run, name) for name in ("run_id", "display_name", "run_group", "project")}
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.summary.update:
            found["summary"][item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.HasField("exit"):
            found["exit"] = record.exit.exit_code
    return found


@pytest.fixture
def wandb_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "wandb"


@pytest.mark.filterwarnings("ignore")
def test_wandb_has_a_run_for_each_run(
    finished: Path, mbridge_here: Run, wandb_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    code, out, _ = mbridge_here("export", finished, "--to", "wandb")
    assert (code, out) == (0, f"wandb: 4 runs written below {wandb_here}; send them with: wandb sync\n")
    runs = {run["display_name"]: run for run in map(wandb_run, wandb_here.glob("offline-run-*/run-*.wandb"))}
    assert set(runs) == {*TIMES, FAILED}
    assert {(run["run_group"], run["project"]) for run in runs.values()} == {(NAME, "mbridge")}
    for key, time in TIMES.items():
        summary, config = runs[key]["summary"], runs[key]["config"]
        assert (summary["step_time_mean_s"], summary["verdict"], runs[key]["exit"]) == (time, "success", 0)
        assert (config["mb"], config["recipe"], config["world_size"]) == (int(key[4]), "gpt_tiny", 2)
    assert "peak_memory_gib" not in runs["t/mb2/0"]["summary"]
    assert (runs[FAILED]["exit"], runs[FAILED]["summary"]["verdict"]) == (1, "failed")
    assert not [name for name in runs[FAILED]["summary"] if "step_time" in name]
    mbridge_here("export", finished, "--to", "wandb")
    ids = [run["run_id"] for run in map(wandb_run, wandb_here.glob("offline-run-*/run-*.wandb"))]
    assert (len(ids), len(set(ids))) == (8, 4), "W&B knows a run by its id"


@pytest.mark.filterwarnings("ignore")
def test_wandb_without_a_key(
    finished: Path, mbridge_here: Run, wandb_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    code, out, err = mbridge_here("export", finished, "--to", "wandb")
    assert (code, out) == (3, "")
    assert err.startswith("error: wandb: ")
    assert err.count("\n") == 1


# OpenTelemetry


def otel_samples(request: Request) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """Return the attributes of the resource, and metric -> point/iteration -> value."""
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    (resource,) = service.ExportMetricsServiceRequest.FromString(request.body).resource_metrics
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    found: dict[str, dict[str, float]] = {}
    for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
        for sample in metric.gauge.data_points:
            labels = {each.key: each.value.string_value for each in sample.attributes}
            found.setdefault(metric.name, {})[f"t/{labels['point']}/{labels['iteration']}"] = sample.as_double
    return about, found


def test_otel_reaches_a_collector(finished: Path, mbridge_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {SECRET}")
    with serving() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        code, out, err = mbridge_here("export", finished, "--to", "otel")
    (request,) = server.requests
    about, found = otel_samples(request)
    assert (request.path, request.headers["authorization"]) == ("/v1/metrics", f"Bearer {SECRET}")
    assert (about["service.name"], about["mbridge.run"]) == ("mbridge", NAME)
    assert found["mbridge.step_time"] == TIMES
    assert found["mbridge.success"] == {**dict.fromkeys(TIMES, 1.0), FAILED: 0.0}
    assert set(found["mbridge.peak_memory"]) == {"t/mb1/0", "t/mb1/1"}
    number = sum(map(len, found.values()))
    assert (code, out, err) == (0, f"otel: {number} samples sent\n", "")


def test_a_collector_that_refuses(finished: Path, mbridge_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    login = base64.b64encode(f"bob:{SECRET}".encode()).decode()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Basic {login}")
    with serving(lambda request: (401, f"not {request.headers['authorization']}".encode())) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        code, out, err = mbridge_here("export", finished, "--to", "otel")
    assert (code, out) == (3, "")
    assert "401" in err
    assert err.count("\n") == 1
    assert login not in err
