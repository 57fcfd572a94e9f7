"""What a user sees while a sweep runs: a live table on a terminal, plain lines elsewhere."""

import contextlib
import dataclasses
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloudai_mbridge.commands.console import SteadyConsole
from cloudai_mbridge.commands.run.watch import Screen, observer_for
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.runner.clock import PlainObserver, RunClock, counts_text, time_text
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus

RUNNING = JobStatus("RUNNING", JobClass.ACTIVE)
COMPLETED = JobStatus("COMPLETED", JobClass.SUCCEEDED)
PENDING = JobStatus("PENDING", JobClass.ACTIVE)


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


def seen(screen: Screen, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(screen.render())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_screen_follows_the_log(plan: ScenarioPlan, tmp_path: Path) -> None:
    console = terminal()
    log = tmp_path / "t/tp1/0/stdout.txt"
    log.parent.mkdir(parents=True)
    observer = observer_for(console, plan, tmp_path)
    assert isinstance(observer, Screen)
    observer.saw(plan.runs[0], RUNNING)
    log.write_text(record(1))
    assert "1/10" in seen(observer)
    with log.open("a") as more:
        more.write(record(2) + record(3)[:20])  # the third record is still being written
    row = next(line for line in seen(observer).splitlines() if line.startswith("tp1"))
    assert row.split() == ["tp1", "RUNNING", "2/10", "0.125", "2.5", "4"]
    assert "1 running, 1 waiting; " in seen(observer)


def test_plain_lines_tell_each_change_once(plan: ScenarioPlan) -> None:
    console = Console(file=io.StringIO(), width=40)
    with PlainObserver(console.file, plan) as observer:
        observer.saw(plan.runs[0], RUNNING)
        observer.saw(plan.runs[0], RUNNING)
        observer.notice("squeue is silent")
        observer.saw(plan.runs[0], JobStatus("FAILED", JobClass.FAILED, exit_code=1, reason="[red]why[/red]"))
    assert plain(console) == [
        "[0/2] t/tp1/0: RUNNING",
        "notice: squeue is silent",
        "[1/2] t/tp1/0: FAILED ([red]why[/red])",
    ]


def plain(console: Console) -> list[str]:
    """Return the lines without their times."""
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [line[9:] for line in lines]


def test_a_job_that_completed_is_told_by_its_verdict(plan: ScenarioPlan) -> None:
    console = Console(file=io.StringIO(), width=40)
    observer = PlainObserver(console.file, plan)
    for run, verdict in zip(plan.runs, ("success", "failed"), strict=True):
        observer.saw(run, COMPLETED)
        observer.decided(run, verdict, ("the loss of step 3 is nan",))
    assert plain(console) == ["[1/2] t/tp1/0: success", "[2/2] t/tp2/0: failed: the loss of step 3 is nan"]
    assert observer.clock.counts == {"done": 1, "failed": 1}


def test_where_nothing_changes_there_is_a_heartbeat(plan: ScenarioPlan) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file, os.fdopen(reading) as lines, PlainObserver(file, plan, heartbeat_s=0.01):
        assert "2 waiting; 00:00:00 elapsed" in lines.readline()
        assert "2 waiting; " in lines.readline()


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
        observer = PlainObserver(file, plan)
        observer.saw(plan.runs[0], RUNNING)
        observer.notice("squeue is silent")
    finally:
        with contextlib.suppress(OSError):
            file.close()


def test_runs_that_are_cancelled_together_have_no_line_each(plan: ScenarioPlan) -> None:
    console = Console(file=io.StringIO(), width=120)
    observer = PlainObserver(console.file, plan)
    observer.saw(plan.runs[0], RUNNING)
    observer.notice("cancelling 2 active jobs")
    for run in plan.runs:
        observer.saw(run, JobStatus("COMPLETING", JobClass.ACTIVE))
        observer.saw(run, JobStatus("INTERRUPTED", JobClass.CANCELLED, reason="mbridge was stopped"))
    assert plain(console) == ["[0/2] t/tp1/0: RUNNING", "notice: cancelling 2 active jobs"]


def ninety(**keys: Any) -> ScenarioPlan:
    return ScenarioPlan("llama3_8b", "h100", tuple(run_plan(f"tp{i}", **keys) for i in range(90)), ())


def at(screen: Screen, state: str, job_class: JobClass, *numbers: int, seconds_ago: float = 0.0) -> None:
    for number in numbers:
        run = screen.clock.plan.runs[number]
        screen.saw(run, JobStatus(state, job_class), time.time() - seconds_ago)


@pytest.mark.parametrize("height", [10, 24, 60])
def test_ninety_runs_fit_any_terminal(tmp_path: Path, height: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=height)
    screen = Screen(console, ninety(), tmp_path)
    at(screen, "COMPLETED", JobClass.SUCCEEDED, *range(30), seconds_ago=3600)
    at(screen, "FAILED", JobClass.FAILED, *range(30, 50))
    at(screen, "RUNNING", JobClass.ACTIVE, *range(50, 70))
    at(screen, "PENDING", JobClass.ACTIVE, *range(70, 80))
    lines = seen(screen).splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= 80
    assert lines[0].rstrip() == "llama3_8b on h100  00:00:00 elapsed"
    assert lines[1].rstrip() == "30 done, 20 failed, 20 running, 10 pending, 10 waiting; 0 GPU-hours"
    states = [line.split()[1] for line in lines[4:] if line.startswith("tp")]
    assert {"RUNNING", "FAILED"} <= {*states}
    assert "COMPLETED" not in states  # an hour ago
    left = [
        f"and {20 - states.count(state)} more {word}" for state, word in (("RUNNING", "running"), ("FAILED", "failed"))
    ]
    assert lines[-1].strip() == ", ".join(text for text in left if "and 0" not in text)


def test_failures_stay_and_what_has_just_ended_is_seen(plan: ScenarioPlan, tmp_path: Path) -> None:
    screen = Screen(terminal(), plan, tmp_path)
    at(screen, "FAILED", JobClass.FAILED, 0, seconds_ago=9999)
    at(screen, "COMPLETED", JobClass.SUCCEEDED, 1, seconds_ago=5)
    assert "FAILED" in seen(screen)
    assert "COMPLETED" in seen(screen)
    screen.decided(plan.runs[1], "success", ())
    assert "success" in seen(screen)


def test_a_run_that_is_tried_again_has_not_failed(plan: ScenarioPlan, tmp_path: Path) -> None:
    screen = Screen(terminal(), plan, tmp_path)
    at(screen, "NODE_FAIL", JobClass.INFRASTRUCTURE, 0)
    at(screen, "RUNNING", JobClass.ACTIVE, 0)
    assert screen.clock.counts == {"running": 1, "waiting": 1}


def test_a_narrow_terminal_shows_which_point_is_meant(tmp_path: Path) -> None:
    plan = ScenarioPlan("s", "local", (run_plan("tp1"),), ())
    screen = Screen(Console(file=io.StringIO(), force_terminal=True, width=40, height=24), plan, tmp_path)
    at(screen, "RUNNING", JobClass.ACTIVE, 0)
    row = next(line for line in seen(screen, 40).splitlines() if "0/10" in line)
    assert row.split() == ["tp1", "RUNNING", "0/10"]


def ended(clock: RunClock, number: int, seconds: float) -> None:
    run = clock.plan.runs[number]
    clock.saw(run, JobStatus("COMPLETED", JobClass.SUCCEEDED, run_time_s=seconds))


def test_time_left_without_predictions_is_that_of_the_runs_so_far() -> None:
    clock = RunClock(ninety())
    assert clock.left_s(clock.started_at, {}) is None
    ended(clock, 0, 50.0)
    ended(clock, 1, 70.0)
    assert clock.left_s(clock.started_at, {}) == 88 * 60.0
    for number in (2, 3):  # two at a time; the one that has begun says how far it is
        clock.saw(clock.plan.runs[number], RUNNING, clock.started_at)
    assert clock.left_s(clock.started_at, {"t/tp2/0": (8, 15.0)}) == (2 * 15.0 + 60.0 + 86 * 60.0) / 2


def test_time_left_is_what_was_predicted_corrected_by_what_has_run() -> None:
    runs = tuple(dataclasses.replace(run_plan(f"tp{i}"), predicted={"step_time_s": float(i + 1)}) for i in range(3))
    runs = (*runs, dataclasses.replace(run_plan("tp9"), num_steps=2000, time_limit_s=60.0))
    clock = RunClock(ScenarioPlan("s", "h100", runs, ()))
    assert clock.left_s(clock.started_at, {}) is None  # before a run has ended
    ended(clock, 0, 155.0)  # half of what 300 s of start-up and ten steps of 1 s are
    assert clock.left_s(clock.started_at, {}) == 160.0 + 165.0 + 60.0
    clock.saw(runs[3], RUNNING, clock.started_at)
    left_s = clock.left_s(clock.started_at + 20.0, {"t/tp9/0": (1, 15.0)})
    assert left_s == 160.0 + 165.0 + 40.0
    clock.is_stopping = True
    assert clock.left_s(clock.started_at, {}) is None


def test_a_search_says_nothing_of_the_time_left() -> None:
    runs = tuple(dataclasses.replace(run_plan(f"tp{i}"), search=SearchPlan()) for i in range(3))
    clock = RunClock(ScenarioPlan("s", "h100", runs, ()))
    ended(clock, 0, 15.0)
    assert clock.left_s(clock.started_at, {}) is None
    assert clock.counts == {"done": 1}


def test_gpu_hours_count_what_runs_and_every_attempt() -> None:
    clock = RunClock(ScenarioPlan("s", "h100", (dataclasses.replace(run_plan("tp1"), ranks_per_node=4),), ()))
    run, begin = clock.plan.runs[0], clock.started_at
    clock.saw(run, RUNNING, begin)
    clock.saw(run, JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE), begin + 900)
    clock.saw(run, RUNNING, begin + 2000)
    assert clock.gpu_hours(begin + 2000 + 900) == pytest.approx(4 * 0.5)


def test_gpu_hours_are_of_whole_nodes() -> None:
    run = dataclasses.replace(run_plan("tp1"), whole_nodes_gpus=4)
    clock = RunClock(ScenarioPlan("s", "h100", (run,), ()))
    clock.saw(run, RUNNING, clock.started_at)
    assert clock.gpu_hours(clock.started_at + 900) == pytest.approx(1.0)


def test_gpu_hours_never_fall() -> None:
    clock = RunClock(ScenarioPlan("s", "h100", (dataclasses.replace(run_plan("tp1"), ranks_per_node=4),), ()))
    run, begin = clock.plan.runs[0], clock.started_at
    clock.saw(run, RUNNING, begin)
    clock.saw(run, JobStatus("COMPLETING", JobClass.ACTIVE), begin + 900)
    assert clock.gpu_hours(begin + 900) == pytest.approx(1.0)
    clock.saw(run, PENDING, begin + 1800)  # requeued
    clock.saw(run, RUNNING, begin + 2000)
    assert clock.gpu_hours(begin + 2900) == pytest.approx(3.0)
    clock.saw(run, JobStatus("COMPLETED", JobClass.SUCCEEDED, run_time_s=1.0), begin + 2900)
    assert clock.gpu_hours(begin + 2900) == pytest.approx(3.0)


def test_the_next_runs_come_first(tmp_path: Path) -> None:
    screen = Screen(Console(file=io.StringIO(), force_terminal=True, width=80, height=12), ninety(), tmp_path)
    at(screen, "RUNNING", JobClass.ACTIVE, 1, 2)
    at(screen, "PENDING", JobClass.ACTIVE, *range(3, 30))
    rows = [line.split()[0] for line in seen(screen).splitlines() if "RUNNING" in line or "PENDING" in line]
    assert rows == [f"tp{number}" for number in range(1, len(rows) + 1)]


def test_a_run_that_has_ended_takes_no_longer(plan: ScenarioPlan) -> None:
    clock = RunClock(plan)
    for run, seconds in zip(plan.runs, (30, 90), strict=True):
        clock.saw(run, COMPLETED, clock.started_at + seconds)
    assert time_text(clock, clock.started_at + 86400, {}) == "00:01:30 elapsed"


def test_times_are_spelt_as_slurm_does() -> None:
    clock = RunClock(ninety())
    ended(clock, 0, 1.0)
    assert counts_text(clock) == "1 done, 89 waiting"
    assert time_text(clock, clock.started_at + 61, {}) == "00:01:01 elapsed, about 00:01:29 left"


def test_no_name_controls_the_terminal(tmp_path: Path) -> None:
    runs = (dataclasses.replace(run_plan("x"), label="x\x1b[31mRED\u202e"),)
    screen = Screen(terminal(), ScenarioPlan("s\x1b]0;t\x07", "local", runs, ()), tmp_path)
    screen.saw(runs[0], RUNNING)
    assert not {"\x1b", "\x07", "\u202e"} & set(seen(screen))
