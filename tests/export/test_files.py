"""`mbridge export` to files: what csv, pyarrow and the client of Prometheus read back is what the report says."""

import csv
import io
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest

from cloudai_mbridge.commands.run.results import export
from cloudai_mbridge.export import targets
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.runner.lock import driver_lock
from tests.export.conftest import FAILED, GOOD, NAME, REJECTED, TIMES, Run, change, points

pytestmark = pytest.mark.process


def rows_of(text: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["point"], row["iteration"]): row for row in csv.DictReader(io.StringIO(text))}


def test_csv_has_a_row_for_each_run(finished: Path, mbridge_here: Run) -> None:
    code, out, err = mbridge_here("export", finished, "--to", "csv")
    rows = rows_of(out)
    assert (code, err) == (0, "")
    assert list(rows) == [(GOOD, "0"), (GOOD, "1"), ("mb2", "0"), ("mb2", "1"), (REJECTED, "")]
    for key, point in points(finished).items():
        if key not in TIMES:
            continue
        row, metrics = rows[point["label"], str(point["iteration"])], point["metrics"]
        assert float(row["step_time_mean_s"]) == metrics["step_time_s"]["mean"] == TIMES[key]
        assert float(row["step_time_std_s"]) == metrics["step_time_s"]["std"]
        assert int(row["step_time_n"]) == metrics["step_time_s"]["n"] == 4
        assert float(row["tflops_per_gpu_mean"]) == metrics["tflops_per_gpu"]["mean"]
        assert float(row["tokens_per_s_per_gpu_mean"]) == metrics["tokens_per_s_per_gpu"]["mean"]
        assert float(row["last_loss"]) == metrics["last_loss"]
        assert float(row["gpu_hours"]) == 2 * 36 / 3600
        assert (row["run"], row["scenario"], row["system"], row["test"]) == (NAME, "s", "here", "t")
        assert (row["mb"], row["gb"], row["world_size"], row["num_nodes"]) == (point["label"][2:], "8", "2", "1")
        assert (row["recipe"], row["gpu"], row["job_id"], row["nodes"]) == ("gpt_tiny", "H100", "17", "n1 n2")
        assert row["ended_at"] == point["job"]["ended_at"]
        assert (row["verdict"], row["reason"]) == ("success", "")


def test_a_run_under_way_has_the_rows_of_what_has_ended(finished: Path, mbridge_here: Run, tmp_path: Path) -> None:
    journal = Journal(finished / "journal.sqlite")
    journal.decided("t/mb1/0", "success", [])
    journal.close()
    with driver_lock(finished):
        code, text, said = mbridge_here("export", finished, "--to", "csv")
        before = (finished / "report.json").read_bytes()
        shown = mbridge_here("generate-report", "--result-dir", finished)
    assert code == 0
    assert [row["verdict"] for row in rows_of(text).values()] == ["success", "rejected"]
    assert said.startswith("note: results so far: 1 of 4 runs ended; held by process ")
    assert shown[0] == 4
    assert "no report is written before the run has ended" in shown[1]
    assert (finished / "report.json").read_bytes() == before


def test_what_is_missing_is_an_empty_cell(finished: Path, mbridge_here: Run) -> None:
    rows = rows_of(mbridge_here("export", finished, "--to", "csv")[1])
    failed, rejected = rows["mb2", "1"], rows[REJECTED, ""]
    measured = [name for name in failed if name.endswith(("_mean_s", "_std_s", "_gpu_mean", "_gpu_std", "_n"))]
    assert len(measured) == 7
    for name in (*measured, "last_loss", "peak_memory_gib", "gpu_hours"):
        assert (name, failed[name], rejected[name]) == (name, "", "")
    assert rows["mb2", "0"]["peak_memory_gib"] == ""
    assert failed["verdict"] == "failed"
    assert "0 of 6 steps are in the log" in failed["reason"]
    assert rejected["reason"].startswith("C04 ")
    assert (rejected["mb"], rejected["runs"]) == ("3", "0")


@pytest.mark.parametrize("loss", ["nan", "inf", None])
def test_a_number_that_is_not_finite_is_missing(loss: Any, finished: Path, mbridge_here: Run) -> None:
    change(finished, "t/mb1/0", metrics={**points(finished)["t/mb1/0"]["metrics"], "last_loss": loss})
    assert rows_of(mbridge_here("export", finished, "--to", "csv")[1])[GOOD, "0"]["last_loss"] == ""


def test_a_row_for_each_point(finished: Path, mbridge_here: Run) -> None:
    rows = rows_of(mbridge_here("export", finished, "--to", "csv", "--by", "point")[1])
    assert list(rows) == [(GOOD, ""), ("mb2", ""), (REJECTED, "")]
    good, half = rows[GOOD, ""], rows["mb2", ""]
    assert (float(good["step_time_mean_s"]), float(good["step_time_std_s"]), good["step_time_n"]) == (0.375, 0.125, "2")
    assert (good["runs"], good["good_runs"], float(good["gpu_hours"])) == ("2", "2", 4 * 36 / 3600)
    assert (half["verdict"], half["runs"], half["good_runs"]) == ("failed", "2", "1")
    assert (float(half["step_time_mean_s"]), half["step_time_n"]) == (0.75, "1")


def test_other_axes_are_columns(finished: Path, mbridge_here: Run) -> None:
    change(finished, "t/mb1/0", coordinates={"mb": 1, "env.A": "=1+1", "run": 7})
    row = rows_of(mbridge_here("export", finished, "--to", "csv")[1])[GOOD, "0"]
    assert (row["env.A"], row["axis.run"], row["run"]) == ("'=1+1", "7", NAME)


def test_parquet_has_types_and_nulls(finished: Path, mbridge_here: Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    code, out, err = mbridge_here("export", finished, "--to", "parquet", "-o", tmp_path / "a.parquet")
    assert (code, out, err) == (0, f"written: {tmp_path}/a.parquet (5 rows)\n", "")
    table = parquet.read_table(tmp_path / "a.parquet")
    rows = {(row["point"], row["iteration"]): row for row in table.to_pylist()}
    good, failed = rows[GOOD, 0], rows["mb2", 1]
    assert (good["step_time_mean_s"], good["step_time_n"], good["mb"], good["tp"]) == (0.5, 4, 1, None)
    assert good["ended_at"] == datetime.fromisoformat(points(finished)["t/mb1/0"]["job"]["ended_at"])
    assert {failed[name] for name in ("step_time_mean_s", "step_time_n", "last_loss", "gpu_hours")} == {None}
    assert rows[REJECTED, None]["verdict"] == "rejected"
    change_all_to_failed(finished)
    mbridge_here("export", finished, "--to", "parquet", "-o", tmp_path / "b.parquet")
    assert parquet.read_schema(tmp_path / "b.parquet") == table.schema, "files of many runs can be read as one"


def change_all_to_failed(root: Path) -> None:
    nothing = points(root)[FAILED]
    for key in TIMES:
        change(root, key, **{name: nothing[name] for name in ("verdict", "reasons", "metrics", "steps", "job")})


Samples = dict[str, dict[tuple[str, str], float]]


def samples(text: str) -> Samples:
    """Return what the client's parser finds: metric -> (point, iteration) -> value."""
    parser = pytest.importorskip("prometheus_client.parser")
    found: Samples = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            place = (labels.get("point", ""), labels.get("iteration", ""))
            assert place not in found.setdefault(sample.name, {}), "a series appears once"
            found[sample.name][place] = sample.value
    return found


def test_prometheus_has_base_units(finished: Path, mbridge_here: Run) -> None:
    code, out, err = mbridge_here("export", finished, "--to", "prometheus")
    found = samples(out)
    assert (code, err) == (0, "")
    assert found["mbridge_step_time_seconds"] == {(GOOD, "0"): 0.5, (GOOD, "1"): 0.25, ("mb2", "0"): 0.75}
    assert found["mbridge_peak_memory_bytes"] == {(GOOD, "0"): 1.75 * 2**30, (GOOD, "1"): 1.75 * 2**30}
    assert found["mbridge_gpu_time_seconds"][GOOD, "0"] == 72
    assert found["mbridge_success"] == {(GOOD, "0"): 1, (GOOD, "1"): 1, ("mb2", "0"): 1, ("mb2", "1"): 0}
    reported = json.loads((finished / "report.json").read_text())["created_at"]
    assert [*found["mbridge_reported_timestamp_seconds"].values()] == [datetime.fromisoformat(reported).timestamp()]


def test_prometheus_has_no_numbers_of_a_run_that_failed(finished: Path, mbridge_here: Run) -> None:
    change(finished, "t/mb1/1", verdict="failed", reasons=["the loss of step 3 is nan"])
    found = samples(mbridge_here("export", finished, "--to", "prometheus")[1])
    assert set(found["mbridge_step_time_seconds"]) == {(GOOD, "0"), ("mb2", "0")}
    assert (found["mbridge_success"][GOOD, "1"], found["mbridge_gpu_time_seconds"][GOOD, "1"]) == (0, 72)


def test_a_series_goes_on_in_the_next_run(finished: Path, mbridge_here: Run) -> None:
    first = mbridge_here("export", finished, "--to", "prometheus")[1]
    finished = finished.rename(finished.with_name("s_2026-11-02_02-00-00"))
    second = mbridge_here("export", finished, "--to", "prometheus")[1]
    changed = set(first.splitlines()) ^ set(second.splitlines())
    assert {line.partition("{")[0] for line in changed} == {"mbridge_reported_timestamp_seconds"}


def test_a_file_is_replaced_as_a_whole(finished: Path, mbridge_here: Run, tmp_path: Path) -> None:
    (directory := tmp_path / "textfile").mkdir()
    path = directory / "mbridge.prom"
    path.write_text("old")
    path.chmod(0o644)
    with path.open() as reader:
        for _ in range(2):
            code, out, _ = mbridge_here("export", finished, "--to", "prometheus", "-o", path)
            assert (code, out) == (0, f"written: {path} (5 rows)\n")
        assert reader.read() == "old"
    assert len(samples(path.read_text())["mbridge_success"]) == 4
    assert (path.stat().st_mode & 0o777, [*directory.iterdir()]) == (0o644, [path])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "parquet"), "--to parquet: needs a file; add --output FILE"),
        (("--to", "mlflow", "-o", "x"), "--output x: mlflow writes no file; leave --output out"),
        (("--to", "csv", "-o", "none/x"), "none/x: its directory does not exist; make none"),
    ],
)
def test_wrong_options(options: tuple[str, ...], message: str, finished: Path, mbridge_here: Run) -> None:
    assert mbridge_here("export", finished, *options) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize(
    ("target", "module", "package"),
    [
        ("parquet", "pyarrow", "pyarrow"),
        ("prometheus", "prometheus_client", "prometheus-client"),
        ("mlflow", "mlflow.tracking", "mlflow-skinny"),
        ("wandb", "wandb", "wandb"),
        ("otel", "opentelemetry.exporter.otlp.proto.http.metric_exporter", "opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_a_library_that_is_not_installed(
    target: str, module: str, package: str, finished: Path, mbridge_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    output = ("-o", finished / "x") if target == "parquet" else ()
    code, out, err = mbridge_here("export", finished, "--to", target, *output)
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert err.endswith(f"install it with: pip install '{package}'\n")


LINES = '''\
"""Lines: the label of each run."""

from cloudai_mbridge.export.table import RunTable


def render(table: RunTable) -> bytes:
    return "".join(f"{row['point']}\\n" for row in table.ran).encode()
'''


def test_a_target_is_one_file(
    finished: Path, mbridge_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in the folder of targets is a choice of --to."""
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "lines.py").write_text(LINES)
    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(tmp_path / "targets")])
    monkeypatch.setattr(export.params[1], "type", click.Choice(targets.names()))
    assert mbridge_here("export", finished, "--to", "lines") == (0, "mb1\nmb1\nmb2\nmb2\n", "")
