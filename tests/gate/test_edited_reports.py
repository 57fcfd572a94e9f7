"""Reports that were edited, or whose numbers cannot be true."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, Damaged
from cloudai_mbridge.export.table import read_table
from cloudai_mbridge.gate.runs import group_by_point, read_results, why_not
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.report.model import comparability_id
from cloudai_mbridge.report.write import write_json
from cloudai_mbridge.verdict import Verdict
from tests.gate.history_data import edit_report
from tests.golden import Sentence
from tests.report.conftest import some_point, some_report

Change = Callable[[dict[str, Any]], object]
STEPS = 12


def _point(jitter: float = 0.0, iteration: int = 0) -> dict[str, Any]:
    steps = [
        StepRecord(i, 1 + i / 997 + jitter, 100 / (1 + i / 997 + jitter), 7 - i / 10, 1.0, 10.0)
        for i in range(1, STEPS + 1)
    ]
    fields = {"num_steps": STEPS, "warmup_steps": 3, "world_size": 2, "num_nodes": 1, "device": "H100"}
    job = {"job_id": str(iteration), "submitted_at": "x", "exit_code": 0, "signal": None, "job_class": "succeeded"}
    metrics = asdict(
        measure(steps, 3, 2048.0, STEPS, flops_per_step=1e12, flops_formula="f", memory_kind="resident set")
    )
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


def written(directory: Path) -> Path:
    """Report a run that is good and one that failed."""
    report = some_report(some_point(), some_point(Verdict.FAILED, "tp2"))
    write_json(report.to_dict(), directory / "report.json")
    return directory / "report.json"


def _reason(tmp_path: Path, change: Change) -> str:
    point = _point()
    change(point)
    (run,) = read_results(_write(tmp_path / "report.json", point))
    return why_not(run)


def test_an_edited_report_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    path = written(tmp_path)
    text = path.read_text()
    step_time = re.search(r'"step_time_s": [0-9.]+', text)
    assert step_time is not None
    for edited in (
        text.replace(step_time[0], '"step_time_s": 0.1', 1),
        text.replace('"verdict": "failed"', '"verdict": "success"', 1),
        text.replace('"schema_version": 3', '"schema_version": 3, "note": ""', 1),
        text.replace('"sha256:', '"sha256:0', 1),
        re.sub(r'"sha256:[0-9a-f]+"', "null", text),
    ):
        assert edited != text
        path.write_text(edited)
        for read in (read_results, read_table):
            with pytest.raises(Damaged) as error:
                read(path)
            sentence(error)


def test_a_report_is_read_whatever_its_form_and_without_a_digest(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole, runs = json.loads(path.read_text()), read_results(path)
    path.write_text(json.dumps(dict(reversed(whole.items())), indent=4, ensure_ascii=False))
    assert read_results(path) == runs
    path.write_text(json.dumps({name: value for name, value in whole.items() if name != "digest"}))
    assert read_results(path) == runs  # of an earlier release
    edit_report(path, lambda report: report.update(system="other"))
    assert {run.system for run in read_results(path)} == {"other"}


def test_the_digest_can_be_made_by_others(tmp_path: Path) -> None:
    report = json.loads(written(tmp_path).read_text())
    digest = report.pop("digest")
    canonical = json.dumps(report, sort_keys=True, separators=(",", ":"))
    assert digest == f"sha256:{hashlib.sha256(canonical.encode('ascii')).hexdigest()}"


@pytest.mark.parametrize("missing", [1, 2, 3, 7, 12])
def test_a_missing_step_does_not_count_whichever_it_is(tmp_path: Path, missing: int) -> None:
    reason = _reason(tmp_path, lambda point: point["steps"].pop(missing - 1))
    assert reason == f"11 of 12 steps are in the log; the first missing is {missing}"


def test_more_steps_than_were_asked_for_do_not_count(tmp_path: Path) -> None:
    def add(point: dict[str, Any]) -> None:
        point["steps"].append({**point["steps"][-1], "step": 13})

    assert _reason(tmp_path, add) == "step 13 is in the log; steps 1 to 12 were configured"


@pytest.mark.parametrize(("name", "value"), [("step_time_s", 5e-324), ("tflops_per_gpu", -5.0)])
def test_impossible_numbers_do_not_count(tmp_path: Path, name: str, value: float) -> None:
    def spoil(point: dict[str, Any]) -> None:
        point["steps"][5][name] = value

    assert _reason(tmp_path, spoil).startswith(f"step 6: {name} = {value:g}")


def test_a_name_that_stands_twice_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    path = _write(tmp_path / "report.json", _point())
    path.write_text(path.read_text().replace('"verdict": ', '"verdict": "failed", "verdict": ', 1))
    with pytest.raises(BadInput) as caught:
        read_results(path)
    sentence(caught)


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
        return point

    ((point,), notes) = group_by_point(read_results(_write(tmp_path / "report.json", rounded(0), rounded(1))))
    assert (len(point.good), notes) == (2, [])
