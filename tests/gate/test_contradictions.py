"""Reports that contradict themselves: their runs do not count, and the reason says what disagrees."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.compare.groups import group_by_point, why_not
from cloudai_mbridge.gate.results.model import comparability_id
from cloudai_mbridge.gate.results.read import read_results
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import Definitions, measure

Change = Callable[[dict[str, Any]], object]
STEPS = 12


def _point(jitter: float = 0.0, iteration: int = 0) -> dict[str, Any]:
    steps = [
        StepRecord(i, 1 + i / 997 + jitter, 100 / (1 + i / 997 + jitter), 7 - i / 10, 1.0, 10.0)
        for i in range(1, STEPS + 1)
    ]
    fields = {"num_steps": STEPS, "warmup_steps": 3, "world_size": 2, "num_nodes": 1, "device": "H100"}
    job = {"job_id": str(iteration), "submitted_at": "x", "exit_code": 0, "signal": None, "job_class": "succeeded"}
    metrics = asdict(measure(steps, 3, 2048.0, Definitions(1e12, "f", "resident set"), STEPS))
    return {
        **{"key": f"t/p/{iteration}", "test_id": "t", "label": "p", "iteration": iteration, "verdict": "success"},
        **{"reasons": [], "failure": None, "num_steps": STEPS, "num_nodes": 1, "world_size": 2, "job": job},
        **{"attempts": [job], "args": {"gb": 4, "seq_length": 1024}, "run": {"flops_per_step": 1e12}},
        **{"comparability": {"id": comparability_id(fields), "fields": fields}, "environment": {"nodes": ["n1"]}},
        **{"metrics": json.loads(json.dumps(metrics)), "steps": [asdict(step) for step in steps]},
    }


def _write(path: Path, *points: dict[str, Any]) -> Path:
    head = {"schema_version": 2, "scenario": "s", "system": "c", "created_at": "2026-11-02T00:00:00+00:00"}
    path.write_text(json.dumps({**head, "points": list(points)}))
    return path


def _reason(tmp_path: Path, change: Change) -> str:
    point = _point()
    change(point)
    (run,) = read_results(_write(tmp_path / "report.json", point))
    return why_not(run)


def _drop_fields(point: dict[str, Any]) -> None:
    point["comparability"]["fields"] = {"device": "H100"}
    for name in ("window", "step_time_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "peak_memory_gib"):
        del point["metrics"][name]


def _stopped(point: dict[str, Any]) -> None:
    point["job"].update(job_class="stopped", signal=15)


@pytest.mark.parametrize("change", [lambda point: None, _drop_fields, lambda point: point["run"].clear(), _stopped])
def test_what_agrees_counts(tmp_path: Path, change: Change) -> None:
    assert _reason(tmp_path, change) == ""


CHANGES: dict[str, tuple[Change, str]] = {
    "warm-up": (lambda p: p["metrics"].update(warmup_steps=5), "warmup_steps is 5, and 3 in the comparability fields"),
    "steps asked for": (lambda p: p.update(num_steps=11), "num_steps is 11, and 12 in the comparability fields"),
    "ranks": (lambda p: p.update(world_size=4), "world_size is 4, and 2 in the comparability fields"),
    "reasons": (lambda p: p["reasons"].append("it failed"), "there are reasons against it: it failed"),
    "failure": (lambda p: p.update(failure={"id": "x"}), "there is a failure"),
    "exit code": (lambda p: p["job"].update(exit_code=1), "the job has exit_code 1"),
    "signal": (lambda p: p["attempts"][0].update(signal=9), "the job has signal 9"),
    "job class": (lambda p: p["job"].update(job_class="lost"), "the job is 'lost'"),
    "step twice": (lambda p: p["steps"].insert(4, p["steps"][3]), "step 4 comes after step 4"),
    "mean": (lambda p: p["metrics"]["step_time_s"].update(mean=0.5), "metrics.step_time_s.mean is 0.5"),
    "count": (lambda p: p["metrics"]["tflops_per_gpu"].update(n=3), "metrics.tflops_per_gpu.n is 3"),
    "tokens": (lambda p: p["metrics"]["tokens_per_s_per_gpu"].update(median=9), "metrics.tokens_per_s_per_gpu.median"),
    "a step changed": (lambda p: p["steps"][8].update(step_time_s=0.2), "metrics.step_time_s.mean"),
    "window": (lambda p: p["metrics"].update(window=[2, 12]), "metrics.window is [2, 12], and steps 4 to 12 count"),
    "memory": (lambda p: p["metrics"].update(peak_memory_gib=1.0), "metrics.peak_memory_gib is 1.0"),
    "no metrics": (lambda p: p.update(metrics=None), "there are no metrics"),
    "FLOPs": (lambda p: p["run"].update(flops_per_step=2e12), "and the run says 2000000000000.0"),
    "work": (lambda p: p["args"].update(gb=8), "tokens_per_step_per_gpu is 2048.0, and the arguments give 4096.0"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_what_disagrees_does_not_count(tmp_path: Path, change: Change, words: str) -> None:
    reason = _reason(tmp_path, change)
    assert reason.startswith("the report contradicts itself: ")
    assert words in reason


HUGE: dict[str, Change] = {
    "mean": lambda p: p["metrics"]["step_time_s"].update(mean=10**400),
    "count": lambda p: p["metrics"]["step_time_s"].update(n=10**400),
    "window": lambda p: p["metrics"].update(window=[10**400, 12]),
    "batch": lambda p: p["args"].update(gb=10**4000),
    "batch and length": lambda p: p["args"].update(gb=10**300, seq_length=10**300),
    "FLOPs": lambda p: p["run"].update(flops_per_step=10**400),
    "ranks": lambda p: p.update(world_size=10**400),
    "job": lambda p: p["job"].update(exit_code=10**4000),
}


@pytest.mark.parametrize("change", HUGE.values(), ids=HUGE)
def test_an_integer_that_no_float_holds_does_not_count(tmp_path: Path, change: Change) -> None:
    reason = _reason(tmp_path, change)
    assert reason.startswith("the report contradicts itself: ")
    assert len(reason) < 500


@pytest.mark.parametrize("missing", [1, 2, 3, 7, 12])
def test_a_missing_step_does_not_count_whichever_it_is(tmp_path: Path, missing: int) -> None:
    def drop(point: dict[str, Any]) -> None:
        del point["steps"][missing - 1]
        _drop_fields(point)

    assert _reason(tmp_path, drop) == f"11 of 12 steps are in the log; the first missing is {missing}"


@pytest.mark.parametrize(("success", "agrees"), [(1, True), (2, False), ("1", False)])
def test_the_summary_agrees_with_the_points(tmp_path: Path, success: Any, agrees: bool) -> None:
    path = _write(tmp_path / "report.json", _point())
    path.write_text(json.dumps({**json.loads(path.read_text()), "summary": {"success": success, "rejected": 5}}))
    (run,) = read_results(path)
    assert (why_not(run) == "") is agrees


def test_more_steps_than_were_asked_for_do_not_count(tmp_path: Path) -> None:
    def add(point: dict[str, Any]) -> None:
        point["steps"].append({**point["steps"][-1], "step": 13})
        _drop_fields(point)

    assert _reason(tmp_path, add) == "step 13 is in the log; steps 1 to 12 were asked for"


@pytest.mark.parametrize(("name", "value"), [("step_time_s", 5e-324), ("tflops_per_gpu", -5.0)])
def test_impossible_numbers_do_not_count(tmp_path: Path, name: str, value: float) -> None:
    def spoil(point: dict[str, Any]) -> None:
        point["steps"][5][name] = value
        _drop_fields(point)

    assert _reason(tmp_path, spoil).startswith(f"step 6: {name} = {value:g}")


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "report.json", _point())
    path.write_text(path.read_text().replace('"verdict": ', '"verdict": "failed", "verdict": ', 1))
    with pytest.raises(BadInput, match="the key 'verdict' appears twice"):
        read_results(path)


@pytest.mark.parametrize(
    ("name", "value"), [("step_time_s", True), ("step_time_s", "1.5"), ("step", True), ("step", "1"), ("loss", "Inf")]
)
def test_numbers_are_numbers(tmp_path: Path, name: str, value: Any) -> None:
    point = _point()
    point["steps"][0][name] = value
    with pytest.raises(BadInput, match=rf"points.0.steps.0.{name}"):
        read_results(_write(tmp_path / "report.json", point))


@pytest.mark.parametrize(("jitter", "kept"), [(0.0, 1), (1e-12, 1), (1e-8, 1), (1e-3, 2)])
def test_a_copy_counts_once_whatever_its_job_is_called(tmp_path: Path, jitter: float, kept: int) -> None:
    results = read_results(_write(tmp_path / "report.json", _point(), _point(jitter, iteration=1)))
    ((point,), notes) = group_by_point(results)
    assert len(point.good) == kept
    assert len(notes) == 2 - kept


def test_rounded_times_that_are_alike_are_of_two_runs(tmp_path: Path) -> None:
    def rounded(iteration: int) -> dict[str, Any]:
        point = _point(iteration=iteration)
        for step in point["steps"]:
            step.update(step_time_s=1.23, tflops_per_gpu=81.3)
        _drop_fields(point)
        return point

    ((point,), notes) = group_by_point(read_results(_write(tmp_path / "report.json", rounded(0), rounded(1))))
    assert (len(point.good), notes) == (2, [])
