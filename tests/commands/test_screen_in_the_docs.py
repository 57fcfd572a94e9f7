"""docs/running.md shows the screen of a run of ninety points; this makes it."""

import dataclasses
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from cloudai_mbridge.commands.run.screen import Screen
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from tests.test_console import run_plan

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
START = 1_800_000_000.0
STEP_S = 5.0
LAYOUTS = [
    f"tp{tp}-pp{pp}-cp{cp}-mb{mb}" for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for cp in (1, 2) for mb in (1, 2, 4, 8)
]
STATES = [
    ("COMPLETED", JobClass.SUCCEEDED, 38, 1000.0),
    ("COMPLETED", JobClass.SUCCEEDED, 2, 20.0),
    ("FAILED", JobClass.FAILED, 3, 600.0),
    ("RUNNING", JobClass.ACTIVE, 8, 150.0),
    ("PENDING", JobClass.ACTIVE, 12, 1500.0),
]


def test_ninety_points_at_80_columns_and_24_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_plan(label, steps=50) for label in LAYOUTS[:90]]
    plan = ScenarioPlan(
        "llama3_8b_layouts", "h100", tuple(dataclasses.replace(run, ranks_per_node=8) for run in runs), ()
    )
    screen = Screen(Console(file=io.StringIO(), force_terminal=True, width=80, height=24), plan, tmp_path)
    monkeypatch.setattr(time, "time", lambda: START)
    screen.clock.started_at = START - 1800
    waiting = iter(plan.runs)
    for state, job_class, count, ago in STATES:
        for run in [next(waiting) for _ in range(count)]:
            active = JobStatus("RUNNING", JobClass.ACTIVE)
            if state != "PENDING":
                screen.saw(run, active, START - ago - (0 if state == "RUNNING" else 50 * STEP_S))
            screen.saw(run, JobStatus(state, job_class), START - ago)
            if verdict := {"COMPLETED": "success", "FAILED": "failed"}.get(state):
                screen.decided(run, verdict, ())
            steps = {"COMPLETED": 50, "FAILED": 3, "RUNNING": 20 + int(run.label[-1]), "PENDING": 0}[state]
            write_log(tmp_path / run.key / "stdout.txt", steps, STEP_S * (1 + int(run.label[2]) / 50))
    out = io.StringIO()
    Console(file=out, width=80, height=24, color_system=None).print(screen.render())
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) < 24
    assert "\n".join(lines) in PAGE.read_text(), "\n".join(lines)


def write_log(path: Path, steps: int, step_time_s: float) -> None:
    path.parent.mkdir(parents=True)
    records = (
        {
            "step": i,
            "step_time_s": step_time_s,
            "tflops_per_gpu": 2150 / step_time_s,
            "losses": {"lm loss": 12 - i / 10},
        }
        for i in range(1, steps + 1)
    )
    path.write_text("".join(f"MBRIDGE_STEP {json.dumps(record)}\n" for record in records))
