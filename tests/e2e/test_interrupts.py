"""Whoever stops a sweep gets everything stopped, a report, and the chance to go on."""

import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.golden import RUN_TIME, Sentence

on_slurm = pytest.mark.slurm

STAND_IN = Path(__file__).parents[1] / "stand_in" / "training.py"
LOCAL = f"""name = "l"
scheduler = "local"
monitor_interval = 0.3
python_executable = "{STAND_IN}"
"""
LONG = {"step_s": 0.2, "at": 2, "hang": 300}


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=2)


@pytest.fixture(scope="module")
def patient(new_cluster: Any) -> Any:
    """A cluster that gives a cancelled job a minute to end."""
    return new_cluster(nodes=1, extra_conf="KillWait=60")


def eight_points(test: Callable[..., str], told: dict[str, Any]) -> list[str]:
    """Return an array of five, one of two, and one that waits for the array."""
    array = test("array", told, args="gb = 16\nmb = [1, 2, 4, 8, 16]")
    single = test("single", told, run='time_limit = "1:00:00"\niterations = 2')
    last = test("last", told, run='[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "array"\n')
    return [array, single, last]


def wait_for_starts(run: Any, count: int, until: Any) -> None:
    def has_started() -> bool:
        return len(list(run.root.glob("*/*/*/started.txt"))) >= count

    until(f"{count} started jobs", has_started)


def processes_of(run: Any) -> list[int]:
    """Return the processes that work in a run's directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(run.root):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def switch(tmp_path: Path, stand_in_told: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """Return what to tell the stand-in so that it does `stand_in_told` until the file, returned too, says `{}`."""
    return {**stand_in_told, "file": str(tmp_path / "now")}, tmp_path / "now"


# ---- one signal


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", [pytest.param("slurm", marks=on_slurm), "local"])
def test_a_signal_cancels_all_and_resume_runs_all(
    start_run: Any,
    stand_in_test: Any,
    until: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    where: str,
    number: signal.Signals,
    code: int,
) -> None:
    """Of eight runs three run, on Slurm two more wait there, and the others wait here; then none is left anywhere."""
    told, file = switch(tmp_path, LONG)
    cluster = request.getfixturevalue("sandbox") if where == "slurm" else None
    system = LOCAL if where == "local" else None
    run = start_run(cluster, eight_points(stand_in_test, told), runner="max_parallel = 3", whole_system=system)
    wait_for_starts(run, 3, until)
    time.sleep(0.5)
    run.send(number)
    run.finish(code, timeout_s=30)
    assert f"interrupted by {number.name}; running jobs were cancelled" in run.stderr
    points = run.points()
    assert len(points) == 8
    assert {point["verdict"] for point in points.values()} == {"cancelled"}
    cancelled = {key for key, point in points.items() if point["attempts"]}
    started = sum((run.root / key / "started.txt").exists() for key in cancelled)
    assert started == 3 or (cluster is not None and started > 3), "Slurm may start a waiting job before it cancels that"
    assert {points[key]["job"]["state"] for key in cancelled} == {"INTERRUPTED"}
    assert all("not submitted" in str(points[key]["reasons"]) for key in points.keys() - cancelled)
    assert not processes_of(run)
    if cluster is not None:
        assert not cluster.run("squeue", "--noheader").stdout, "they were to be waited for"

    file.write_text("{}")
    run = run.resume().finish(0)
    points = run.points()
    assert {key: point["verdict"] for key, point in points.items()} == dict.fromkeys(points, "success")
    assert {len(point["attempts"]) for key, point in points.items() if key in cancelled} == {2}
    assert {len(point["attempts"]) for key, point in points.items() if key not in cancelled} == {1}
    for key in points:
        assert len((run.root / key / "started.txt").read_text().splitlines()) == 1


@on_slurm
def test_interrupted_while_it_submits(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, tmp_path: Path
) -> None:
    """The signal comes while sbatch is under way: its job is known, and cancelled with the others."""
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\ntouch {tmp_path}/called\nsleep 1\nexec {real} "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    told, file = switch(tmp_path, LONG)
    run = start_run(sandbox, [stand_in_test("one", told), stand_in_test("two", told)], path=str(tmp_path))
    until("sbatch", (tmp_path / "called").exists)
    run.send(signal.SIGINT)
    run.finish(130, timeout_s=30)
    assert not sandbox.run("squeue", "--noheader").stdout
    file.write_text("{}")
    run = run.resume().finish(0)
    assert {point["verdict"] for point in run.points().values()} == {"success"}


@on_slurm
def test_somebody_else_cancels_tasks_that_wait(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, nothing_left: Any
) -> None:
    """They vanish from their array, and Slurm lists them no more. Nobody wants them back."""
    test = stand_in_test("array", LONG, args="gb = 8\nmb = [1, 2, 4, 8]")
    run = start_run(sandbox, [test], runner="max_parallel = 1")
    wait_for_starts(run, 1, until)
    array = run.job("array").partition("_")[0]
    sandbox.run("scancel", f"{array}_2", f"{array}_3")
    until("two ends", lambda: run.read_output().count(": CANCELLED") == 2, 10)
    sandbox.run("scancel", array)
    run.finish(1)
    points = run.points()
    assert {point["verdict"] for point in points.values()} == {"failed"}
    assert {point["job"]["state"] for point in points.values()} == {"CANCELLED"}
    assert {len(point["attempts"]) for point in points.values()} == {1}
    nothing_left(sandbox)


# ---- a second one


@on_slurm
def test_a_second_signal_does_not_wait(
    start_run: Any, stand_in_test: Any, until: Any, patient: Any, tmp_path: Path, nothing_left: Any
) -> None:
    """The jobs ignore SIGTERM, and Slurm would give them a minute."""
    stubborn = tmp_path / "python"
    stubborn.write_text(f"#!/bin/bash\n[ -e {tmp_path}/now ] || trap '' TERM\nexec {STAND_IN} \"$@\"\n")
    stubborn.chmod(0o755)
    system = (
        f'name = "c"\nscheduler = "slurm"\ndefault_partition = "main"\nmonitor_interval = 0.3\n'
        f'python_executable = "{stubborn}"\n[[partitions]]\nname = "main"\n'
    )
    told, file = switch(tmp_path, LONG)
    run = start_run(patient, [stand_in_test("stubborn", told, args="gb = 8\nmb = [1, 2]")], whole_system=system)

    def have_stepped() -> bool:
        logs = run.root.glob("stubborn/*/*/stdout.txt")
        return sum('"step": 1,' in log.read_text() for log in logs) == 2

    until("a step of both jobs, which ignore the signal then", have_stepped)
    jobs = run.jobs()
    run.send(signal.SIGINT)
    run.wait_for_words("cancelling 2 active jobs")
    time.sleep(2)
    assert run.process.poll() is None, "it was to wait for its jobs"
    run.send(signal.SIGINT)
    run.finish(130, timeout_s=30)
    assert f"mbridge did not wait; may still run: {', '.join(jobs.values())}" in run.stderr
    assert {point["verdict"] for point in run.points().values()} == {"cancelled"}
    assert patient.run("squeue", "--noheader").stdout

    file.write_text("{}")
    for process in processes_of(run):  # which spares us the minute
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process).kill()
    run = run.resume().finish(0)
    points = run.points()
    assert {key: point["verdict"] for key, point in points.items()} == dict.fromkeys(points, "success")
    assert {len(point["attempts"]) for point in points.values()} == {2}
    assert not set(run.jobs().values()) & set(jobs.values())
    nothing_left(patient)


@pytest.mark.parametrize("where", [pytest.param("slurm", marks=on_slurm), "local"])
def test_what_is_said_of_ninety_cancelled_runs_is_a_few_lines(
    start_run: Any, stand_in_test: Any, until: Any, request: pytest.FixtureRequest, where: str
) -> None:
    cluster = request.getfixturevalue("sandbox") if where == "slurm" else None
    system = LOCAL if where == "local" else None
    run = start_run(cluster, [stand_in_test("many", LONG, run="iterations = 90")], whole_system=system)
    wait_for_starts(run, 1, until)
    before = len((run.directory / "mbridge.stdout").read_text().splitlines())
    run.send(signal.SIGINT)
    run.finish(130, timeout_s=120)
    points = run.points()
    assert [point["verdict"] for point in points.values()] == ["cancelled"] * 90
    assert not any(point["evidence"] for point in points.values())
    assert "90 cancelled" in run.stdout
    assert f"continue with: mbridge resume {run.root}" in run.stdout
    said = run.stdout.splitlines()[before:] + run.stderr.splitlines()
    told_of_starts = [line for line in said if re.match(r"[\d:]{8} \[\d+/90\] \S+: (PENDING|RUNNING)", line)]
    assert len(said) - len(told_of_starts) <= 20, "\n".join(said)


# ---- the runner's own


@pytest.mark.parametrize("where", [pytest.param("slurm", marks=on_slurm), "local"])
def test_fail_fast_stops_the_rest(
    start_run: Any, stand_in_test: Any, request: pytest.FixtureRequest, where: str
) -> None:
    cluster = request.getfixturevalue("sandbox") if where == "slurm" else None
    tests = [
        stand_in_test("long", LONG),
        stand_in_test("bad", {"step_s": 0.3, "at": 2, "exit": 5}, run='time_limit = "1:00:00"'),
        stand_in_test("last", run='[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "long"\n'),
    ]
    system = LOCAL if where == "local" else None
    run = start_run(cluster, tests, runner="max_parallel = 2", args=["--fail-fast"], whole_system=system)
    run.finish(1, timeout_s=40)
    assert run.point("bad")["verdict"] == "failed"
    assert run.point("bad")["job"]["exit_code"] == 5
    assert run.point("long")["job"]["state"] == "CANCELLED"
    assert run.point("long")["verdict"] == "cancelled"
    assert "fail_fast: bad/single/0 failed" in str(run.point("long")["reasons"])
    assert run.point("last")["verdict"] == "skipped"
    assert run.point("last")["reasons"] == ["fail_fast: bad/single/0 failed"]
    assert not processes_of(run)
    if cluster is not None:
        assert not cluster.run("squeue", "--noheader").stdout


@on_slurm
def test_a_second_driver_is_refused(
    start_run: Any, stand_in_test: Any, mbridge: Any, until: Any, sandbox: Any, nothing_left: Any, sentence: Sentence
) -> None:
    run = start_run(sandbox, [stand_in_test("one", LONG)])
    wait_for_starts(run, 1, until)
    second = mbridge("resume", run.root, env=run.env)
    assert second.returncode == 5
    assert second.stdout == ""
    assert second.stderr.count("\n") == 1
    assert not (run.root / "report.json").exists()
    sentence(second.stderr, time=RUN_TIME)
    assert run.process.poll() is None
    run.send(signal.SIGTERM)
    run.finish(143)
    assert len(run.jobs()) == 1
    nothing_left(sandbox)
