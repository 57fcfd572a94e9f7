"""What a user sees while a sweep runs: a live table on a terminal, plain lines elsewhere."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloudai_mbridge.commands.live_view import LiveObserver, PlainObserver, SteadyConsole, observer_for
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus

RUNNING = JobStatus("RUNNING", JobClass.ACTIVE)


def run_plan(label: str, steps: int = 10) -> RunPlan:
    tables = ("coordinates", "args", "training_config", "definition", "env", "secret_env")
    values: dict[str, Any] = {name: {} for name in tables}
    return RunPlan(
        key=f"t/{label}/0", test_id="t", test_name="t", label=label, iteration=0, recipe="gpt_tiny",
        num_nodes=1, ranks_per_node=1, num_steps=steps, warmup_steps=3, **values,
    )  # fmt: skip


@pytest.fixture
def plan() -> ScenarioPlan:
    return ScenarioPlan("s", "local", (run_plan("tp1"), run_plan("tp2")), ())


def record(step: int) -> str:
    values = {"step": step, "step_time_s": 0.125, "tflops_per_gpu": 2.5, "losses": {"lm loss": 6.0 - step}}
    return f"MBRIDGE_STEP {json.dumps(values)}\n"


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def test_live_table_follows_the_log(plan: ScenarioPlan, tmp_path: Path) -> None:
    console = terminal()
    log = tmp_path / "t/tp1/0/stdout.txt"
    log.parent.mkdir(parents=True)
    observer = observer_for(console, plan, tmp_path)
    assert isinstance(observer, LiveObserver)
    with observer:
        log.write_text(record(1))
        observer.saw(plan.runs[0], RUNNING)
        with log.open("a") as more:
            more.write(record(2) + record(3)[:20])  # the third record is still being written
        observer.saw(plan.runs[0], RUNNING)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    row = [line for line in lines if "t/tp1" in line][-1]
    for part in ("RUNNING", "2/10", "0.125", "2.5", "4"):
        assert part in row
    assert "waiting" in [line for line in lines if "t/tp2" in line][-1]


def test_plain_lines_tell_each_change_once(plan: ScenarioPlan) -> None:
    console = Console(file=io.StringIO(), width=40)
    with PlainObserver(console, plan) as observer:
        observer.saw(plan.runs[0], RUNNING)
        observer.saw(plan.runs[0], RUNNING)
        observer.notice("squeue is silent")
        observer.saw(plan.runs[0], JobStatus("FAILED", JobClass.FAILED, exit_code=1, reason="[red]why[/red]"))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "[0/2] t/tp1/0: RUNNING",
        "notice: squeue is silent",
        "[1/2] t/tp1/0: FAILED ([red]why[/red])",
    ]


def test_a_pipe_gets_plain_lines(plan: ScenarioPlan, tmp_path: Path) -> None:
    assert isinstance(observer_for(Console(file=io.StringIO()), plan, tmp_path), PlainObserver)


def test_a_reader_that_goes_away_ends_nothing() -> None:
    """rich ends the process at a broken pipe; the runs of a sweep must not depend on who reads about them."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        console = SteadyConsole(file=file)
        for _ in range(3):
            console.print("x " * 5_000)
        assert console.quiet


def test_a_full_disk_below_the_output_ends_nothing(plan: ScenarioPlan) -> None:
    file = open("/dev/full", "w")  # noqa: SIM115 - closing it fails, too
    try:
        observer = PlainObserver(SteadyConsole(file=file), plan)
        observer.saw(plan.runs[0], RUNNING)
        observer.notice("squeue is silent")
    finally:
        with contextlib.suppress(OSError):
            file.close()


def test_runs_that_are_cancelled_together_have_no_line_each(plan: ScenarioPlan) -> None:
    console = Console(file=io.StringIO(), width=120)
    observer = PlainObserver(console, plan)
    observer.saw(plan.runs[0], RUNNING)
    observer.notice("cancelling 2 active jobs")
    for run in plan.runs:
        observer.saw(run, JobStatus("COMPLETING", JobClass.ACTIVE))
        observer.saw(run, JobStatus("INTERRUPTED", JobClass.CANCELLED, reason="mbridge was stopped"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines() == ["[0/2] t/tp1/0: RUNNING", "notice: cancelling 2 active jobs"]
