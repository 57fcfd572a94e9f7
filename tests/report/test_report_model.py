"""The report as values, as strict JSON, as text and as a table."""

import io
import json
import math
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.report.model import SCHEMA_VERSION, PointReport, RunReport
from cloudai_mbridge.report.terminal import render_table
from cloudai_mbridge.report.text import render_point, render_summary, with_error
from cloudai_mbridge.report.write import write_report
from cloudai_mbridge.verdict import Verdict
from tests.cases import every
from tests.report.conftest import VIOLATION, some_point, some_rejected, some_report


def _point(verdict: Verdict = Verdict.SUCCESS, test_id: str = "sweep", label: str = "tp1", **keys: Any) -> PointReport:
    steps = tuple(StepRecord(i, float(i), 10.0 * i, 7.0 - i) for i in (1, 2, 3, 4))
    data = {"test_id": test_id, "steps": steps, "metrics": measure(steps, 2, 100.0)}
    return some_point(verdict, label, **{**data, **keys})


def _rejected(test_id: str = "sweep", label: str = "tp9", **keys: Any) -> PointReport:
    return some_rejected(label, test_id=test_id, **keys)


def _strict(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _table(report: RunReport, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_table(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Values


@pytest.mark.parametrize(
    ("points", "succeeded"),
    [
        ((), False),
        ((_point(),), True),
        ((_point(), _point(label="tp2")), True),
        ((_point(), _rejected()), True),
        ((_point(), _point(Verdict.FAILED)), False),
        ((_point(), _point(Verdict.SKIPPED, label="tp2")), False),  # a part of what was asked for did not run
        ((_point(is_pre_test=True),), False),  # nothing but nodes was checked
        ((_point(), _point(Verdict.FAILED, "pre_test", is_pre_test=True)), True),
        ((_point(), _point(Verdict.SKIPPED, "pre_test", is_pre_test=True)), True),
        ((_rejected(),), False),
        ((_point(), _rejected(test_id="other")), False),  # a whole test was left out
        ((_point(), _point(test_id="other"), _rejected(test_id="other")), True),
    ],
)
def test_when_a_scenario_has_succeeded(points: tuple[PointReport, ...], succeeded: bool) -> None:
    assert some_report(*points).succeeded is succeeded


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (309.4, 120.0, "310 ±120"),
        (5.19, 0.0314, "5.190 ±0.031"),
        (338.4, 1.99, "338.4 ±2.0"),
        (0.5, 0.0996, "0.50 ±0.10"),
        (123456.0, 12.3, "123456 ±12"),
        (5.19, 1e-9, "5.19 ±1e-09"),
        (5.19, 0.0, "5.19 ±0"),
        (-0.5, 0.25, "-0.50 ±0.25"),
        (2e12, 3e10, "2e+12 ±3e+10"),
    ],
)
def test_a_number_ends_where_its_error_does(value: float, error: float, text: str) -> None:
    assert with_error(value, error) == text


def test_many_rejected_points_are_one_line_until_asked_for() -> None:
    rejected = [_rejected(label=f"tp{number}") for number in range(13)]
    report = some_report(_point(), *rejected, num_rejected=13, rule_counts={"C04": 13})
    texts = []
    for all_rejected in (False, True):
        out = io.StringIO()
        Console(width=200, file=out).print(render_table(report, all_rejected=all_rejected))
        texts.append(out.getvalue())
    assert "rejected: 13 points, by rule: C04 13; --rejected lists them" in texts[0]
    assert ("tp12" in texts[0], "tp12" in texts[1]) == (False, True)


def test_counts() -> None:
    report = some_report(_point(), _point(Verdict.FAILED), _point(Verdict.SKIPPED), _rejected(), _rejected())
    assert [report.count(verdict) for verdict in Verdict] == [1, 1, 1, 0, 2, 0]
    assert report.to_dict()["summary"] == {"success": 1, "failed": 1, "skipped": 1, "rejected": 2}


# JSON


def test_the_published_form() -> None:
    data = _strict(json.dumps(some_report(_point(), _rejected()).to_dict(), allow_nan=False))
    assert data["schema_version"] == SCHEMA_VERSION == 3
    assert data["tool"] == {"name": "cloudai-mbridge", "version": "1"}
    assert (data["scenario"], data["system"]) == ("s", "here")
    good, rejected = data["points"]
    assert good["verdict"] == "success"
    of_all = {"n": 2, "mean": 3.5, "median": 3.5, "min": 3.0, "max": 4.0, "std": 0.5}
    capped = {"capped_mean": pytest.approx(3.425), "capped_std": pytest.approx(0.425)}  # 4.0 counts as 3.85
    assert good["metrics"]["step_time_s"] == {**of_all, **capped}
    assert (good["metrics"]["warmup_steps"], good["metrics"]["window"]) == (2, [3, 4])
    assert good["steps"][0] == {
        "step": 1,
        "step_time_s": 1.0,
        "tflops_per_gpu": 10.0,
        "loss": 6.0,
        "grad_norm": None,
        "peak_memory_gib": None,
        "left_out": "",
    }
    assert (rejected["verdict"], rejected["metrics"], rejected["steps"]) == ("rejected", None, [])
    assert rejected["violations"][0]["operands"] == {"gb": 8, "mb": 3, "dp": 2}


def test_numbers_that_json_cannot_hold() -> None:
    steps = (StepRecord(1, 1.0, math.inf, math.nan), StepRecord(2, 1.0, -math.inf, 5.0))
    point = _point(steps=steps, metrics=measure(steps, 0, None), run={"x": [math.nan, {"y": math.inf}]})
    data = _strict(json.dumps(some_report(point).to_dict(), allow_nan=False))["points"][0]
    assert [(step["tflops_per_gpu"], step["loss"]) for step in data["steps"]] == [("inf", "nan"), ("-inf", 5.0)]
    assert data["run"] == {"x": ["nan", {"y": "inf"}]}
    assert (data["metrics"]["tflops_per_gpu"], data["metrics"]["first_loss"]) == (None, "nan")


def test_what_was_not_measured_is_null() -> None:
    point = _point(Verdict.FAILED, steps=(), metrics=measure((), 2, None))
    metrics = _strict(json.dumps(some_report(point).to_dict(), allow_nan=False))["points"][0]["metrics"]
    assert metrics["step_time_s"] is None
    assert {name: value for name, value in metrics.items() if value is not None} == {"warmup_steps": 2}


# Text


def test_the_text_of_a_run_begins_as_cloudais() -> None:
    text = render_point(_point(), Path("/results"))
    assert (
        text
        == """\
Source log: /results/sweep/tp1/0/stdout.txt

Step Time (s)
  avg: 3.5
  median: 3.5
  min: 3.0
  max: 4.0
  std: 0.5

TFLOP/s per GPU
  avg: 35.0
  median: 35.0
  min: 30.0
  max: 40.0
  std: 5.0

Steps counted: 3-4 (n=2), warm-up 1-2 left out
Step time: 3.425 s (a step counts as at most 1.1 x the median)
Tokens/s/GPU: 29.2 ±3.7
Last loss: 3
Verdict: success
"""
    )


def test_the_text_of_a_failed_run_says_why() -> None:
    point = _point(
        Verdict.FAILED,
        steps=(),
        metrics=measure((), 2, None),
        reasons=("the job ended as FAILED (exit code 1)",),
        evidence=("ValueError: x",),
    )
    text = render_point(point, Path("/results"))
    assert "Step Time (s)\n  not measured\n\nTFLOP/s per GPU\n  not measured\n" in text
    assert "Steps counted: none\nVerdict: failed\n  - the job ended as FAILED (exit code 1)\n" in text
    assert text.endswith("  | ValueError: x\n")
    assert "0.0" not in text
    assert "-1" not in text


def test_the_text_of_a_run_tells_its_memory() -> None:
    steps = tuple(StepRecord(i, 1.0, 1.0, 5.0, None, 0.25 * i) for i in (1, 2, 3))
    metrics = measure(steps, 2, None, memory_kind="resident set")
    text = render_point(_point(steps=steps, metrics=metrics), Path("/r"))
    assert "\nLast loss: 5\nPeak memory: 0.75 GiB (resident set)\nVerdict: success\n" in text


ATTEMPTS = (
    {"number": 1, "job_id": "17", "nodes": "n1", "state": "NODE_FAIL", "failure": "node_failure", "reason": "NodeDown"},
    {"number": 2, "job_id": "18", "nodes": "", "state": "FAILED", "failure": "", "reason": "NonZeroExitCode"},
    {"number": 3, "job_id": "19", "nodes": "n2", "state": "COMPLETED", "failure": "", "reason": ""},
)


def test_the_text_of_a_run_tells_its_attempts() -> None:
    text = render_point(_point(attempts=ATTEMPTS), Path("/results"))
    assert text.endswith(
        """\
Attempts:
  1: job 17 on n1: NODE_FAIL, node_failure
  2: job 18: FAILED, NonZeroExitCode
  3: job 19 on n2: COMPLETED
"""
    )
    assert "Attempts" not in render_point(_point(attempts=ATTEMPTS[:1]), Path("/results"))


def test_excluded_nodes_are_told_everywhere() -> None:
    report = some_report(_point(), excluded_nodes={"n[/]7": "gpu_lost in a/b/0"})
    line = "node n[/]7 was excluded: gpu_lost in a/b/0"
    assert line in render_summary(report).splitlines()
    assert line in _table(report)
    assert report.to_dict()["excluded_nodes"] == {"n[/]7": "gpu_lost in a/b/0"}


def test_the_evidence_of_a_known_failure_has_its_title() -> None:
    failure = {"id": "gpu_lost", "kind": "infrastructure", "title": "A GPU no longer answers", "remedy": "drain it"}
    point = _point(Verdict.FAILED, failure=failure, evidence=("stderr.txt:3: fallen off the bus",))
    text = _table(some_report(point))
    assert "sweep/tp1/0: A GPU no longer answers" in text
    assert "| stderr.txt:3: fallen off the bus" in text
    assert some_report(point).to_dict()["points"][0]["failure"] == failure


def test_without_a_warm_up_it_is_said() -> None:
    steps = (StepRecord(1, 1.0, 1.0, 5.0),)
    text = render_point(_point(steps=steps, metrics=measure(steps, 0, None)), Path("/r"))
    assert "Steps counted: 1-1 (n=1), no warm-up left out" in text


def test_the_summary_names_every_point() -> None:
    text = render_summary(some_report(_point(), _point(Verdict.FAILED, label="tp2", reasons=("why",)), _rejected()))
    lines = text.splitlines()
    assert lines[0] == "Scenario s on here: 1 success, 1 failed, 0 skipped, 1 rejected"
    assert lines[2].startswith("sweep/tp1/0: success, step time 3.425 s, 35.04 TFLOP/s/GPU, steps 3-4 (n=2)")
    assert "sweep/tp2/0: failed" in text
    assert "  - why\n" in text
    assert f"  - {VIOLATION['message']}\n" in text


def test_all_reports_are_written(tmp_path: Path) -> None:
    (tmp_path / "sweep/tp1/0").mkdir(parents=True)
    path = write_report(some_report(_point(), _rejected()), tmp_path)
    assert path == tmp_path / "report.json"
    assert _strict(path.read_text())["summary"]["rejected"] == 1
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        "report.json",
        "report.html",
        "report.md",
        "report.txt",
        "junit.xml",
        "steps.csv",
        "steps.parquet",
        "sweep/tp1/0/report.txt",
    }


def test_the_file_is_the_published_form(tmp_path: Path) -> None:
    """A line per point, and the same to every reader."""
    for points in ((), (_point(),), (_point(), _point(key="sweep/x/0", label="\ud800 é"), _rejected())):
        report = some_report(*points)
        text = write_report(report, tmp_path).read_text(encoding="ascii")
        assert _strict(text) == _strict(json.dumps(report.to_dict()))
        assert sum(line.startswith("  {") for line in text.splitlines()) == len(points)


def test_what_is_written_again_replaces_the_old(tmp_path: Path) -> None:
    write_report(some_report(_point()), tmp_path)
    write_report(some_report(_point(), scenario="another"), tmp_path)
    assert _strict((tmp_path / "report.json").read_text())["scenario"] == "another"
    assert not list(tmp_path.glob(".*"))


# Table


def test_the_table_shows_every_point_with_its_numbers() -> None:
    failed = _point(
        Verdict.FAILED,
        label="tp2",
        steps=(),
        metrics=measure((), 2, None),
        reasons=("0 of 4 steps are in the log; the first missing is 1",),
        evidence=("ValueError: x",),
    )
    text = _table(some_report(_point(), failed, _rejected()))
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert set(rows) == {"tp1", "tp2", "tp9"}
    for cell in ("success", "4/4", "3.43 ±0.43 (mean 3.5)", "35.0 ±4.4", "6.000 → 3.000"):
        assert cell in rows["tp1"]
    for cell in ("failed", "0/4", "not measured", "0 of 4 steps are in the log"):
        assert cell in rows["tp2"]
    assert "C04 8 is not divisible by mb*dp = 6 (gb=8, mb=3, dp=2)" in rows["tp9"]
    assert "ValueError: x" in text
    assert "\n1 success, 1 failed, 0 skipped, 1 rejected; capped mean ±std over " in text


def _cancelled(number: int, reason: str = "mbridge was stopped", **keys: Any) -> list[PointReport]:
    nothing: dict[str, Any] = {"steps": (), "metrics": measure((), 2, None), "reasons": (reason,)}
    return [_point(Verdict.CANCELLED, label=f"{reason[:3]}{i}", **{**nothing, **keys}) for i in range(number)]


def test_many_cancelled_runs_are_one_line_per_reason() -> None:
    report = some_report(_point(), *_cancelled(40), *_cancelled(50, "not submitted: mbridge was stopped"))
    text = _table(report)
    assert "40 runs cancelled: mbridge was stopped: sweep/mbr0/0, sweep/mbr1/0, ..., sweep/mbr39/0" in text
    assert "50 runs cancelled: not submitted: mbridge was stopped: " in text
    assert "1 success, 0 failed, 0 skipped, 90 cancelled, 0 rejected" in text
    assert len(text.splitlines()) < 15
    assert not report.succeeded


def test_few_cancelled_runs_have_their_rows() -> None:
    text = _table(some_report(*_cancelled(3)))
    assert "3 cancelled" in text
    assert all(f"│ mbr{i} " in text for i in range(3))


def test_failed_runs_that_ran_are_never_folded() -> None:
    failed = [_point(Verdict.FAILED, label=f"f{i}", reasons=("x",), attempts=({"number": 1},)) for i in range(9)]
    text = _table(some_report(*failed))
    assert all(f"│ f{i} " in text for i in range(9))


def test_cancelled_runs_are_counted_where_there_are_any() -> None:
    assert some_report(*_cancelled(2)).to_dict()["summary"]["cancelled"] == 2
    assert "cancelled" not in some_report(_point()).to_dict()["summary"]


def test_the_window_below_the_table_is_that_of_the_numbers() -> None:
    assert "mean ±std over steps 3-4 (n=2), warm-up 1-2 left out" in _table(some_report(_point()))


@every("name", ["[red]x[/red]", "[/]", "[link=http://x]y", "a\\[b]", ":smile:", "a\\"])
def test_names_are_shown_as_they_are(name: str) -> None:
    reports = (
        some_report(_point(), scenario=name),
        some_report(_point(), system=name),
        some_report(_point(test_id=name), _point(Verdict.FAILED, test_id="b")),
        some_report(_point(label=name)),
        some_report(_point(Verdict.FAILED, reasons=(name,))),
        some_report(_point(Verdict.FAILED, evidence=(name,))),
        some_report(_rejected(violations=({**VIOLATION, "fact": name},))),
    )
    assert [number for number, report in enumerate(reports) if name not in _table(report)] == []


def test_iterations_can_be_told_apart() -> None:
    text = _table(some_report(_point(), _point(iteration=1)))
    assert "│ tp1/1 " in text


def test_a_test_of_which_nothing_was_planned_is_no_success() -> None:
    assert some_report(_point(), tests=("sweep",)).succeeded
    assert not some_report(_point(), tests=("sweep", "another")).succeeded
