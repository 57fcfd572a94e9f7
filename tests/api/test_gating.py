"""The gate from Python says what the command says."""

import json
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from cloudai_mbridge.gate.verdict import GateVerdict
from tests.api.conftest import write_sweep
from tests.golden import RUN_TIME, Sentence

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> mb.Run:
    directory = tmp_path_factory.mktemp("slower")
    write_sweep(directory, iterations=3, says_s=0.6)
    return mb.load(directory / "scenario.toml", system=directory / "system.toml").plan().run()


def test_a_slower_sweep_is_a_regression(swept: mb.Run, slower: mb.Run) -> None:
    gate = mb.compare_runs(swept, slower)
    assert gate.verdict is GateVerdict.REGRESSION
    rows = {(row["point"], row["metric"]): row for row in gate.table.rows}
    row = rows["layouts/mb2", "step_time_s"]
    assert row["change"] == pytest.approx(0.2, abs=0.01)
    assert row["change_low"] < row["change"] < row["change_high"]
    assert (row["num_runs"], row["num_baseline_runs"]) == (3, 5)
    pytest.importorskip("pandas")
    frame = gate.to_pandas()
    assert set(frame[frame.metric == "step_time_s"].point_verdict) == {"regression"}


def test_the_same_as_the_command_says(
    swept: mb.Run, slower: mb.Run, tmp_path: Path, mbridge: Any, sentence: Sentence
) -> None:
    policy, baseline, file = tmp_path / "policy.toml", tmp_path / "baseline.toml", tmp_path / "gate.json"
    policy.write_text('name = "p"\nbaseline = "baseline.toml"\n')
    done = mbridge("baseline", "promote", swept.path, "--baseline", baseline, "--reason", "the first", "--yes")
    assert done.returncode == 0, done.stderr
    gate = mb.gate_runs([slower], policy=policy)
    done = mbridge("gate", slower.path, "--policy", policy, "--json", file)
    data = json.loads(file.read_text())
    assert (gate.exit_code, str(gate.verdict)) == (done.returncode, data["verdict"]) == (10, "regression")
    assert [(point.point, str(point.verdict)) for point in gate.points] == [
        (point["point"], point["verdict"]) for point in data["points"]
    ]
    moved = baseline.rename(tmp_path / "moved.toml")
    assert mb.gate_runs(slower.path / "report.json", policy=policy, baseline=moved).verdict is gate.verdict
    with pytest.raises(mb.BadInput) as caught:
        mb.gate_runs(slower, policy=policy)
    sentence(caught, time=RUN_TIME)


def test_a_run_is_never_compared_with_itself(swept: mb.Run) -> None:
    gate = mb.compare_runs(swept, swept)
    assert gate.verdict is GateVerdict.NOT_RUN
    assert all(row["words"] and "metric" not in row for row in gate.table.rows)


def test_a_side_without_runs_is_bad_input(swept: mb.Run, sentence: Sentence) -> None:
    with pytest.raises(mb.BadInput) as caught:
        mb.compare_runs(swept, [])
    sentence(caught)
