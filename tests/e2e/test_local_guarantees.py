"""This machine gives the same guarantees as Slurm: whatever kills the driver, every point runs once and is judged."""

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

STAND_IN = Path(__file__).parents[1] / "stand_in" / "training.py"
REAL = 'name = "l"\nscheduler = "local"\nmonitor_interval = 0.3\n'
LOCAL = f'{REAL}python_executable = "{STAND_IN}"\n'
HANGS = {"step_s": 0.2, "at": 2, "hang": 300}


def processes_of(run: Any, words: str = "") -> list[psutil.Process]:
    """Return the processes that work in a run's directory and have some words in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(run.root) and words in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def check_exactly_once(run: Any, num_points: int) -> None:
    points = run.points()
    assert len(points) == len(run.report["points"]) == num_points
    for key, point in points.items():
        assert point["verdict"] == "success", point["reasons"]
        assert len(point["attempts"]) == 1
        started = (run.root / key / "started.txt").read_text().splitlines()
        assert len(started) == 1, started
        assert started[0].startswith(f"job={point['job']['job_id']} ")
        assert [step["step"] for step in point["steps"]] == list(range(1, point["num_steps"] + 1))
        assert not list((run.root / key).glob("attempt-*"))
    assert not processes_of(run)


def kill(run: Any) -> None:
    assert run.process.poll() is None, run.read_output()
    run.process.kill()
    run.process.wait()


# ---- the driver is killed


def test_killed_while_a_training_runs(start_run: Any, stand_in_test: Any) -> None:
    run = start_run(None, [stand_in_test("one", {"step_s": 0.5}, steps=30)], whole_system=LOCAL)
    job = run.wait_for_step("one", 2)
    kill(run)
    assert processes_of(run, "training.py"), "the training was to go on"
    run = run.resume().finish(0)
    assert run.point("one")["job"]["job_id"] == job
    check_exactly_once(run, 1)


@pytest.mark.long
def test_killed_while_a_real_training_runs(start_run: Any, stand_in_test: Any) -> None:
    pytest.importorskip("torch")
    test = stand_in_test("real", steps=100, num_gpus=2, args="gb = 16")
    run = start_run(None, [test], whole_system=REAL)
    job = run.wait_for_step("real", 3)
    kill(run)
    assert '"step": 100,' not in run.log("real"), "it was to be killed before the end"
    assert len(processes_of(run, "cloudai_mbridge.training")) >= 3, "torchrun and two ranks"
    run = run.resume().finish(0)
    assert run.point("real")["job"]["job_id"] == job
    check_exactly_once(run, 1)


@pytest.mark.parametrize("ending", ["success", "failure", "killed"])
def test_the_training_ends_while_there_is_no_driver(
    start_run: Any, stand_in_test: Any, until: Any, tmp_path: Path, ending: str
) -> None:
    told = {"at": 3, "wait_for": str(tmp_path / "go")} | ({"exit": 7} if ending == "failure" else {})
    run = start_run(None, [stand_in_test("one", told)], whole_system=LOCAL)
    run.wait_for_step("one", 3)
    kill(run)
    if ending == "killed":
        for process in processes_of(run):
            process.kill()
    (tmp_path / "go").touch()
    until("its end", lambda: not processes_of(run))
    run = run.resume().finish(0 if ending == "success" else 1)
    if ending == "success":
        check_exactly_once(run, 1)
        return
    point = run.point("one")
    assert point["verdict"] == "failed"
    assert point["job"]["state"] == "FAILED"
    assert (point["job"]["exit_code"], point["job"]["signal"]) == ((7, None) if ending == "failure" else (None, 9))
    assert any("of 5 steps are in the log" in reason for reason in point["reasons"])
    assert len(point["attempts"]) == 1


@pytest.mark.drill
@pytest.mark.parametrize("parallel", [1, 2])
def test_killed_again_and_again(start_run: Any, stand_in_test: Any, parallel: int) -> None:
    """In a training or between two; and however often, no more than `max_parallel` train at a time."""
    seed = int(os.environ.get("MBRIDGE_KILL_SEED") or random.randrange(1 << 32))
    print(f"MBRIDGE_KILL_SEED={seed}")
    chance = random.Random(seed)
    test = stand_in_test("one", {"step_s": 0.12}, run="iterations = 6")
    run = start_run(None, [test], runner=f"max_parallel = {parallel}", whole_system=LOCAL)
    kills, started = 0, time.monotonic()
    kill_at = started + chance.uniform(0.5, 1.5)
    while run.process.poll() is None and time.monotonic() < started + 90:
        if time.monotonic() > kill_at and kills < 6 and any(run.directory.glob("out/*/plan.json")):
            kill(run)
            kills += 1
            run = run.resume()
            kill_at = time.monotonic() + chance.uniform(0.4, 1.6)
        time.sleep(0.02)
    run.finish(0)
    check_exactly_once(run, 6)
    assert most_at_a_time(run) == parallel
    assert kills >= 2


def most_at_a_time(run: Any) -> int:
    """Return how many scripts ran at a time, by when they wrote down their starts and their ends."""
    starts = [(path.stat().st_mtime, 1) for path in run.root.glob("*/*/*/started.txt")]
    ends = [(path.stat().st_mtime, -1) for path in run.root.glob("*/*/*/exit_code.txt")]
    return max(itertools.accumulate(step for _, step in sorted(starts + ends)))


MOMENTS = {
    "between_the_intent_and_the_start": "die()",
    "between_the_start_and_the_journal": "real(self, argv, *args, **more); die()",
}
# Python imports it when it starts
SITE = """
import os, signal, subprocess
real = subprocess.Popen.__init__
def die():
    open({file!r}, "x").close()
    os.kill(os.getpid(), signal.SIGKILL)
def start(self, argv, *args, **more):
    if argv == ["bash", "run.sh"] and not os.path.exists({file!r}):
        {moment}
    real(self, argv, *args, **more)
subprocess.Popen.__init__ = start
"""


@pytest.mark.parametrize(
    ("moment", "is_over"),
    [
        ("between_the_intent_and_the_start", True),
        ("between_the_start_and_the_journal", False),
        ("between_the_start_and_the_journal", True),
    ],
)
def test_killed_at_a_start(
    start_run: Any, stand_in_test: Any, until: Any, tmp_path: Path, moment: str, is_over: bool
) -> None:
    """is_over: the script has ended, if it was started at all, when the next driver looks for it."""
    (tmp_path / "sitecustomize.py").write_text(SITE.format(file=str(tmp_path / "dead"), moment=MOMENTS[moment]))
    tests = [stand_in_test("one", {"step_s": 0.4}, run="iterations = 2")]
    run = start_run(None, tests, whole_system=LOCAL, env={"PYTHONPATH": str(tmp_path)})
    run.finish(-signal.SIGKILL)
    assert run.query("SELECT key, job_id FROM attempts") == [("one/single/0", None)]
    if is_over:
        until("its end", lambda: not processes_of(run))
    run = run.resume().finish(0)
    check_exactly_once(run, 2)


# ---- what is adopted is still watched


@pytest.mark.long
def test_a_time_limit_holds_for_what_was_adopted(start_run: Any, stand_in_test: Any, until: Any) -> None:
    limit_s = 30.0
    run = start_run(None, [stand_in_test("one", HANGS, run='time_limit = "30s"')], whole_system=LOCAL)
    run.wait_for_step("one", 2)
    started = time.monotonic()
    kill(run)
    until("the limit to have passed", lambda: time.monotonic() - started > limit_s)
    resumed = time.monotonic()
    run = run.resume().finish(1)
    assert time.monotonic() - resumed < limit_s, "the limit counts from the start of the job, not from the adoption"
    assert run.point("one")["job"]["state"] == "TIMEOUT"
    assert len(run.point("one")["attempts"]) == 1
    assert not processes_of(run)


def test_a_hang_of_what_was_adopted_is_noticed(start_run: Any, stand_in_test: Any) -> None:
    run = start_run(None, [stand_in_test("one", HANGS)], runner="hang_timeout_s = 2", whole_system=LOCAL)
    run.wait_for_step("one", 2)
    kill(run)
    run = run.resume().finish(1, timeout_s=20)
    assert run.point("one")["job"]["state"] == "HUNG"
    assert "after step 2" in str(run.point("one")["reasons"])
    assert not processes_of(run)


def test_what_was_adopted_is_cancelled(start_run: Any, stand_in_test: Any, until: Any) -> None:
    run = start_run(None, [stand_in_test("one", HANGS), stand_in_test("two")], whole_system=LOCAL)
    run.wait_for_step("one", 2)
    kill(run)
    run = run.resume()
    words = f"process {run.process.pid} on "
    until("its adoption", lambda: words in (run.root / "driver.lock").read_text())
    time.sleep(0.5)
    run.send(signal.SIGINT)
    run.finish(130, timeout_s=20)
    assert run.point("one")["job"]["state"] == "INTERRUPTED"
    assert not processes_of(run)
