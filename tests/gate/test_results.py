"""Reading report.json: what a gate takes from it, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.runs import METRICS, read_results, value_of
from cloudai_mbridge.metrics import capped_mean
from tests.gate.history_data import START, make_point, write_report


def point(**changes: Any) -> dict[str, Any]:
    return {**make_point(2.0, steps=3), **changes}


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    (run,) = read_results(write_report(tmp_path / "report.json", [point()]))
    assert (run.point, run.is_success, run.nodes, run.ended_at) == ("t/tp=1", True, ("n1", "n2"), START.isoformat())
    assert {name: value_of(metric, run) for name, metric in METRICS.items()} == run.values
    expected = {"step_time_s": 2.0, "step_time_mean_s": 2.0, "tflops_per_gpu": 471.5, "tokens_per_s_per_gpu": 512.0}
    assert {name: values[0] for name, values in run.values.items() if len(values) == 1} == pytest.approx(
        {**expected, "peak_memory_gib": 10.0}
    )
    assert run.values["loss_curve"] == pytest.approx((2.0, 1.9, 1.8))


def test_a_directory_stands_for_its_report(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", [point()])
    assert len(read_results(tmp_path)) == 1


def test_rejected_points_and_pre_tests_are_no_runs(tmp_path: Path) -> None:
    rejected = point(verdict="rejected", comparability=None, metrics=None, steps=[])
    assert read_results(write_report(tmp_path / "report.json", [rejected, point(is_pre_test=True)])) == []


def test_a_run_keeps_its_id_when_its_report_is_written_again(tmp_path: Path) -> None:
    first = read_results(write_report(tmp_path / "a.json", [point()]))[0].run_id
    again = point(reasons=["said otherwise"], environment={"nodes": []})
    assert read_results(write_report(tmp_path / "b.json", [again]))[0].run_id == first
    other = point(attempts=[{"job_id": "2", "submitted_at": "x"}])
    assert read_results(write_report(tmp_path / "c.json", [other]))[0].run_id != first


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_no_values(tmp_path: Path, text: str) -> None:
    steps = point()["steps"]
    steps[2] |= dict.fromkeys(("loss", "step_time_s", "tflops_per_gpu", "peak_memory_gib"), text)
    (run,) = read_results(write_report(tmp_path / "report.json", [point(steps=steps)]))
    assert not math.isfinite(run.steps[2].loss or 0)
    assert all(value_of(metric, run) is None for metric in METRICS.values())


def test_a_time_of_zero_is_no_value(tmp_path: Path) -> None:
    steps = point()["steps"]
    steps[2]["step_time_s"] = 0.0
    (run,) = read_results(write_report(tmp_path / "report.json", [point(steps=steps)]))
    assert value_of(METRICS["step_time_s"], run) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": "x"}, "points.0.steps"),
        ({"verdict": 3}, "points.0.verdict"),
        ({"comparability": {}}, "points.0.comparability.id"),
    ],
)
def test_what_is_no_report_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_results(write_report(tmp_path / "report.json", [point(**change)]))


def test_the_capped_mean_follows_modes_and_not_single_steps() -> None:
    assert capped_mean([1.0] * 9 + [50.0]) == pytest.approx(1.01)
    assert capped_mean([1.0, 1.05] * 10) == pytest.approx(1.025)
    assert capped_mean([3.0]) == 3.0
