"""One screen at the end of a run: the fastest points, why others failed, what it cost."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.terminal import render_ending
from cloudai_mbridge.verdict import Verdict
from tests.golden import GoldenFile
from tests.report.conftest import VIOLATION, some_point, some_rejected, some_report

DOCS = Path(__file__).parents[2] / "docs"
H100 = {"device": "NVIDIA H100 80GB HBM3"}
OUT_OF_MEMORY: dict[str, Any] = {
    "reasons": ("A GPU ran out of memory (out_of_memory); use a smaller micro-batch, more tp or pp, or recomputation",),
    "failure": {"id": "out_of_memory", "title": "A GPU ran out of memory"},
    "evidence": ("stderr.txt:7: torch.OutOfMemoryError: CUDA out of memory.", "stderr.txt:8: the next line"),
    "metrics": None,
    "steps": (),
}


def timed(label: str, step_time_s: float, spread: float = 0.01, tokens: float = 4096.0, **keys: Any) -> PointReport:
    """Return a run on 8 GPUs whose measured steps alternate around a time."""
    steps = tuple(
        StepRecord(
            i,
            step_time_s * (1 + spread * (-1) ** i),
            2000.0 / step_time_s * (1 - spread * (-1) ** i),
            7.0 - i / 10,
            0.5,
            60.0,
        )
        for i in range(1, 9)
    )
    metrics = measure(
        steps,
        2,
        tokens,
        flops_per_step=1e15,
        flops_formula="megatron-bridge/new v1",
        memory_kind="accelerator, reserved",
    )
    attempts = ({"number": 1, "run_time_s": 90.0},)
    more: dict[str, Any] = {
        "world_size": 8,
        "steps": steps,
        "metrics": metrics,
        "attempts": attempts,
        "environment": H100,
    }
    return some_point(label=label, **{**more, **keys})


def shown(report: RunReport, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_ending(report, width), crop=False)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def thirteen_points() -> RunReport:
    layouts = [(tp, pp, mb) for tp in (2, 4, 8) for pp in (1, 2) for mb in (1, 2)]
    times = [5.91, 5.62, 5.58, 5.34, 5.21, 5.19, 5.47, 5.4, 6.31, 6.02]
    points = [
        timed(f"tp{tp}-pp{pp}-mb{mb}", seconds, 0.006, num_steps=8)
        for (tp, pp, mb), seconds in zip(layouts, times, strict=False)
    ]
    failed = [some_point(Verdict.FAILED, f"tp{tp}-pp1-mb4", **OUT_OF_MEMORY, environment=H100) for tp in (2, 4)]
    rejected = [some_rejected(label, coordinates={}) for label in ("tp3-pp1-mb1",)]
    return some_report(
        *points, *failed, *rejected, scenario="llama3_8b_layouts", system="h100", num_rejected=1, rule_counts={"M01": 1}
    )


def test_thirteen_points_are_one_screen_and_the_documentation_shows_it(golden_file: GoldenFile) -> None:
    report = thirteen_points()
    assert len(report.points) == 13
    lines = [*shown(report), "report: results/llama3_8b_layouts_2026-11-25_10-31-37/report.html"]
    lines.append("every point: mbridge show results/llama3_8b_layouts_2026-11-25_10-31-37")
    assert len(lines) < 24  # one is left for the prompt
    assert max(map(len, lines)) <= 80
    golden_file(DOCS / "captures" / "ending-80x24.txt", "\n".join([*lines, ""]))


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("count", [1, 2, 90])
def test_many_points_are_one_screen(count: int, width: int) -> None:
    lines = shown(some_report(*(timed(f"mb{i}", 1 + i / 100, 0.001) for i in range(count))), width)
    assert len(lines) <= 21
    rows = [line for line in lines if line.startswith("mb")]
    assert [row.split()[0] for row in rows] == [f"mb{i}" for i in range(len(rows))]
    assert (f"and {count - len(rows)} slower points; " in "\n".join(lines)) == (len(rows) < count)


def test_gpu_hours_are_of_whole_nodes_where_a_job_took_these() -> None:
    exclusive = timed("mb1", 1.0, attempts=({"number": 1, "run_time_s": 900.0, "gpus": 16},))
    assert "; 4 GPU-hours" in " ".join(shown(some_report(exclusive)))


def test_a_narrow_terminal_shows_which_point_is_meant() -> None:
    repeats = [timed("tp2-pp1-mb1", 5.0, iteration=i) for i in range(2)]
    row = next(line for line in shown(some_report(*repeats), 40) if "2/2" in line)
    assert row.split() == ["tp2-pp1-mb1", "2/2", "5", "±0"]


def test_the_fastest_is_named_with_what_is_no_slower() -> None:
    points = [timed("mb4", 1.2, 0.001), timed("mb1", 1.0, 0.02), timed("mb2", 1.01, 0.001)]
    assert shown(some_report(*points))[1] == "fastest: mb1, 1 s a step; within noise of it: mb2"
    assert shown(some_report(*points[:2]))[1] == "fastest: mb1, 1 s a step"
    assert "fastest" not in "".join(shown(some_report(points[0])))


def test_a_capture_in_the_window_does_not_make_a_point_slow() -> None:
    """The graph's capture takes as long as four steps; the plain mean stands beside the time that ranks."""
    captured = timed("graphs", 2.0, 0.001)
    slow = replace(captured.steps[3], step_time_s=9.0, tflops_per_gpu=2000 / 9)
    steps = (*captured.steps[:3], slow, *captured.steps[4:])
    points = [replace(captured, steps=steps, metrics=measure(steps, 2, 4096.0)), timed("plain", 2.6, 0.001)]
    lines = shown(some_report(*points), 100)
    assert lines[1].startswith("fastest: graphs, 2.03")
    (row,) = (line for line in lines if line.startswith("graphs"))
    assert "(mean 3.16" in row


def test_where_steps_differ_in_work_the_fastest_has_the_most_tokens() -> None:
    points = [timed("gb64", 1.0, tokens=4096), timed("gb128", 1.9, tokens=8192)]
    lines = shown(some_report(*points))
    assert lines[1] == "fastest: gb128, 4312 tokens/s/GPU"
    assert [line.split()[0] for line in lines[4:6]] == ["gb128", "gb64"]


def test_each_test_has_its_fastest() -> None:
    points = [
        timed(label, seconds, test_id=test)
        for test, label, seconds in (("a", "mb1", 2.0), ("b", "mb1", 1.0), ("a", "mb2", 1.5), ("b", "mb2", 1.2))
    ]
    lines = shown(some_report(*points))
    assert lines[1:3] == ["fastest of a: mb2, 1.5 s a step", "fastest of b: mb1, 1 s a step"]
    assert [line.split()[0] for line in lines[5:9]] == ["a/mb2", "a/mb1", "b/mb1", "b/mb2"]


def test_repeats_are_one_row() -> None:
    runs = [timed("mb1", seconds, iteration=i) for i, seconds in enumerate((1.0, 1.1, 1.2))]
    runs.append(some_point(Verdict.FAILED, "mb1", iteration=3, **OUT_OF_MEMORY))
    rows = [line.split() for line in shown(some_report(*runs), 140) if line.startswith("mb1")]
    assert rows == [["mb1", "3/4", "1.100", "±0.082", *rows[0][4:]]]


def test_failures_are_grouped_by_cause_with_one_excerpt() -> None:
    points = [some_point(Verdict.FAILED, f"mb{i}", **OUT_OF_MEMORY) for i in range(20)]
    points += [some_point(Verdict.CANCELLED, "tp1", reasons=("the job ended as CANCELLED",))]
    text = "\n".join(shown(some_report(*points), 200))
    assert text.count("A GPU ran out of memory") == 1
    assert "failed: sweep/mb0/0, sweep/mb1/0, sweep/mb2/0 and 17 more: " in text
    assert text.count("torch.OutOfMemoryError") == 1
    assert "cancelled: sweep/tp1/0: the job ended as CANCELLED" in text


def test_a_hang_shows_where_each_rank_is_and_breaks_no_path() -> None:
    path = f"/scratch/{'a' * 90}.py"
    frames = [f'stacks/rank-{rank}.txt:   File "{path}", line {line}' for rank in (0, 1) for line in (7, 8)]
    hang = {"id": "hang", "title": "The job made no progress"}
    hung = some_point(Verdict.FAILED, reasons=("no step",), failure=hang, evidence=(*frames, "stderr.txt:1: the end"))
    assert shown(some_report(hung))[2:] == [f"  | {frames[0]}", f"  | {frames[2]}"]


def test_many_causes_are_counted() -> None:
    points = [some_point(Verdict.FAILED, f"mb{i}", reasons=(f"reason {i}",)) for i in range(9)]
    lines = shown(some_report(*points))
    assert "and 6 other causes" in lines
    assert len(lines) <= 21


def test_rejected_points_are_counted_by_rule() -> None:
    report = some_report(timed("mb1", 1.0), some_rejected(), num_rejected=40, rule_counts={"C04": 40, "M01": 3})
    assert "rejected: 40 points, by rule: C04 40, M01 3" in shown(report)


@pytest.mark.parametrize(("device", "is_told"), [("NVIDIA H100", True), ("CPU Intel", False)])
def test_what_gpus_cost_is_told(device: str, is_told: bool) -> None:
    text = "\n".join(shown(some_report(timed("mb1", 1.0, environment={"device": device}))))
    assert ("; 0.2 GPU-hours" in text) == is_told


def test_nothing_in_a_report_controls_the_terminal() -> None:
    escape = "x\x1b[31mRED\x07\u202e"
    keys: dict[str, Any] = {"label": escape, "test_id": escape, "reasons": (escape,), "evidence": (escape,)}
    broken = some_rejected(violations=({**VIOLATION, "rule_id": escape},))
    report = some_report(
        timed(escape, 1.0),
        timed(escape + "2", 1.0),
        some_point(Verdict.FAILED, **keys),
        broken,
        notes=(escape,),
        scenario=escape,
        excluded_nodes={escape: escape},
        num_rejected=1,
        rule_counts={escape: 1},
    )
    text = "\n".join(shown(report, 300))
    assert text.count("RED") >= 8
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
