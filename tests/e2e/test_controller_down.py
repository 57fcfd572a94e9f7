"""A Slurm that does not answer is waited for, and what it has forgotten is settled by what the jobs left behind."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slurm

DOWN_S = 30.0
SLOW = {"step_s": 1}  # of five steps


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    """With a short MessageTimeout (s): a command tells three times as late that nobody answers."""
    return new_cluster(nodes=2, extra_conf="MessageTimeout=1")


@pytest.fixture
def controller_down(sandbox: Any) -> Iterator[Callable[[], Any]]:
    """Kill the controller for the time of a `with` block. What it has been told before, it remembers."""

    @contextmanager
    def down() -> Iterator[None]:
        sandbox.kill_controller(save=True)
        try:
            yield
        finally:
            sandbox.start_controller()

    yield down
    sandbox.start_controller()
    sandbox.run("scancel", "--user=root", check=False)


def starts(run: Any, key: str) -> list[str]:
    """Return one line for every start of a run's script, in all attempts."""
    files = [run.root / key / "started.txt", *(run.root / key).glob("attempt-*/started.txt")]
    return [line for file in files for line in file.read_text().splitlines()]


def check_all_succeeded_once(run: Any, num_points: int) -> None:
    points = run.points()
    assert len(points) == num_points
    for key, point in points.items():
        assert point["verdict"] == "success", point["reasons"]
        assert len(starts(run, key)) == 1, starts(run, key)
        assert len(point["attempts"]) == 1


def wait_for_starts(run: Any, count: int, until: Any) -> None:
    until(f"{count} started jobs", lambda: num_starts(run) >= count)


def num_starts(run: Any) -> int:
    return len(list(run.root.glob("*/*/*/started.txt")))


# ---- the controller is down


@pytest.mark.long
def test_down_for_half_a_minute_in_the_middle(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, controller_down: Any, nothing_left: Any
) -> None:
    """Four run and end meanwhile, four more are in the queue, and one waits for them all."""
    tests = [
        stand_in_test("many", SLOW, args="gb = 8\nmb = [1, 2, 4, 8]\nseq_length = [64, 128]"),
        stand_in_test("last", run='[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "many"\n'),
    ]
    run = start_run(sandbox, tests, runner="max_parallel = 4")
    wait_for_starts(run, 4, until)
    time.sleep(2)
    with controller_down():
        time.sleep(DOWN_S)
    run.finish(0)
    check_all_succeeded_once(run, 9)
    assert run.words.count("; asking again") == 1, run.words
    assert "notice: squeue failed: " in run.words
    assert run.words.count("notice: the scheduler answers again") == 1
    nothing_left(sandbox)


@pytest.fixture
def slow_sbatch(tmp_path: Path, sandbox: Any) -> Path:
    """Put an sbatch in front of the real one. In its third call it waits for a file `go`, which says what then.

    "ask": asks the real one. "mute": asks the real one, and loses the answer.
    """
    program = tmp_path / "sbatch"
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    program.write_text(
        f"""#!/bin/bash
echo >> {tmp_path}/calls
if [ "$(wc -l < {tmp_path}/calls)" = 3 ]; then
 while [ ! -e {tmp_path}/go ]; do sleep 0.05; done
 if grep -q mute {tmp_path}/go; then
  {real} "$@" > /dev/null
  echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2
  exit 1
 fi
fi
exec {real} "$@"
"""
    )
    program.chmod(0o755)
    return tmp_path


@pytest.mark.drill
@pytest.mark.parametrize("word", ["ask", "mute"])
def test_down_while_a_submission_is_due(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, controller_down: Any, slow_sbatch: Path, word: str
) -> None:
    """Whether the controller took the job, or never heard of it, is found out; then it runs once.

    A job stays active throughout, so that the controller saves what it knows before it is killed: one that has
    forgotten the end of a job runs it again, and tells nobody.
    """
    active = stand_in_test("active", {"step_s": 5}, run='time_limit = "1:00:00"')
    first = stand_in_test("first")
    second = stand_in_test("second", run='[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "first"\n')
    run = start_run(sandbox, [first, second, active], path=str(slow_sbatch))
    until("the second sbatch", lambda: _num_calls(slow_sbatch) == 3)
    if word == "mute":
        (slow_sbatch / "go").write_text(word)
    else:
        with controller_down():
            (slow_sbatch / "go").write_text(word)
            run.wait_for_words("asking again")
    run.finish(0)
    check_all_succeeded_once(run, 3)
    assert "sbatch failed: " in run.words
    assert "Unable to contact slurm controller" in run.words
    assert "the scheduler answers again" in run.words
    assert _num_calls(slow_sbatch) == (3 if word == "mute" else 4)


def _num_calls(directory: Path) -> int:
    calls = directory / "calls"
    return len(calls.read_text()) if calls.exists() else 0


@pytest.mark.long
def test_down_for_longer_than_its_patience(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, controller_down: Any, nothing_left: Any
) -> None:
    tests = [
        stand_in_test("many", {"step_s": 6}, args="gb = 8\nmb = [1, 2]"),
        stand_in_test("last", run='[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "many"\n'),
    ]
    run = start_run(sandbox, tests, runner="patience_s = 4")
    wait_for_starts(run, 2, until)
    time.sleep(2)
    jobs = run.jobs()
    with controller_down():
        run.finish(4)
        assert "paused after 4 s" in run.stderr
        assert f"may still run: {', '.join(jobs.values())};" in run.stderr
        assert f"continue with: mbridge resume {run.root}" in run.stderr
        assert {point["verdict"] for point in run.points().values()} == {"failed"}, "an unseen end is not a success"
        again = run.resume().finish(3)
        assert "Slurm does not respond" in again.stderr
    run.resume().finish(0)
    assert {key: id_ for key, id_ in run.jobs().items() if key.startswith("many/")} == jobs
    check_all_succeeded_once(run, 3)
    nothing_left(sandbox)


# ---- Slurm has forgotten the jobs

FAKES = {"failing": "sacct", "hanging": "sacct", "squeue": "squeue"}
FAKE_TEXT = {
    "failing": "echo 'sacct: error: slurm_persist_conn_open_without_init: failed to open connection' >&2; exit 1",
    "hanging": "exec sleep 300",
    "squeue": 'if [ -e "$0.hangs" ]; then exec sleep 300; fi; exec {real} "$@"',
}


@pytest.fixture(scope="module")
def forgetful(new_cluster: Any) -> Any:
    """A cluster with accounting whose controller forgets ended jobs at once, or nearly so; all jobs fit at once."""
    return new_cluster(nodes=3, accounting=True, extra_conf="MinJobAge=2")


@pytest.fixture(scope="module")
def without_accounting(new_cluster: Any) -> Any:
    return new_cluster(nodes=1, extra_conf="MinJobAge=2")


def fake(directory: Path, kind: str, sandbox: Any) -> str:
    real = shutil.which(FAKES[kind], path=sandbox.env["PATH"])
    program = directory / FAKES[kind]
    program.write_text(f"#!/bin/bash\n{FAKE_TEXT[kind].format(real=real)}\n")
    program.chmod(0o755)
    return str(directory)


@pytest.mark.drill
def test_jobs_that_end_and_are_forgotten_while_nobody_looks(
    start_run: Any, stand_in_test: Any, until: Any, forgetful: Any, without_accounting: Any, tmp_path: Path
) -> None:
    """One sweep per way in which Slurm fails to tell; each driver is stopped until the controller has forgotten."""
    tests = [
        stand_in_test("good", {"step_s": 2}, args="gb = 8\nmb = [1, 2]"),
        stand_in_test("bad", {"step_s": 3, "at": 2, "exit": 7}),
    ]
    runs = {"accounted": start_run(forgetful, tests), "without": start_run(without_accounting, tests)}
    for kind in ("failing", "hanging", "squeue"):
        (tmp_path / kind).mkdir()
        path = fake(tmp_path / kind, kind, forgetful)
        runs[kind] = start_run(forgetful, tests, path=path)
    stopped = [name for name in runs if name != "squeue"]
    waiting = dict(runs)
    while waiting:  # each is stopped before one of its jobs can end
        until("3 started jobs", lambda: [name for name, run in waiting.items() if num_starts(run) >= 3])
        for name in [name for name, run in waiting.items() if num_starts(run) >= 3]:
            run = waiting.pop(name)
            if name in stopped:
                run.send(signal.SIGSTOP)
    (tmp_path / "squeue" / "squeue.hangs").touch()  # for the 60 s that it takes to give up, and a little more
    for name, sandbox in [(name, without_accounting if name == "without" else forgetful) for name in stopped]:
        for job_id in runs[name].jobs().values():
            until(f"{job_id} is forgotten", lambda id_=job_id, at=sandbox: _is_forgotten(id_, at), 120)
    for name in stopped:
        runs[name].send(signal.SIGCONT)
    for run in (runs[name] for name in stopped):
        run.finish(1)
    runs["squeue"].wait_for_words("asking again", 90)
    (tmp_path / "squeue" / "squeue.hangs").unlink()
    runs["squeue"].finish(1)

    for name, run in runs.items():
        for key, point in run.points().items():
            assert point["verdict"] == ("success" if "good" in key else "failed"), (name, point)
            assert len(starts(run, key)) == 1
        assert run.point("bad")["job"]["exit_code"] == 7, name
    marker = "from the job's own marker; Slurm has forgotten the job"
    assert "marker" not in runs["accounted"].words
    assert marker in runs["without"].words
    assert "sacct" not in runs["without"].words, "that a cluster has no accounting is no trouble"
    assert f"{marker}; sacct failed: sacct: error: slurm_persist_conn_open_without_init" in runs["failing"].words
    assert f"{marker}; sacct did not respond within 20 s" in runs["hanging"].words
    assert "squeue did not respond within 60 s; asking again" in runs["squeue"].words
    assert "the scheduler answers again" in runs["squeue"].words


def test_a_controller_that_lists_a_job_as_running_that_has_ended(
    new_cluster: Any, start_run: Any, stand_in_test: Any, until: Any, tmp_path: Path
) -> None:
    """It was killed and has an older state; the accounting and the job's own exit code know better."""
    patient = "SlurmdTimeout=3600"  # else the controller takes the nodes for dead, and their jobs too
    sandbox, go, older = new_cluster(nodes=2, accounting=True, extra_conf=patient), tmp_path / "go", tmp_path / "state"
    state = Path(sandbox.directory) / "state"
    run = start_run(sandbox, [stand_in_test("a", {"at": 2, "wait_for": str(go)}, steps=5)])
    job = run.wait_for_step("a", 2)
    sandbox.kill_controller(save=True)
    shutil.copytree(state, older)
    sandbox.start_controller()
    run.process.send_signal(signal.SIGSTOP)
    until("the last answer before the end", lambda: not _runs_a_command(run.process.pid))
    go.touch()
    sacct = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", f"--jobs={job}")
    until("the job's end in the accounting", lambda: "COMPLETED" in sandbox.run(*sacct).stdout)
    sandbox.kill_controller(save=False)
    for name in sandbox.node_names:  # which would tell it at once
        sandbox.kill_slurmd(name)
    shutil.rmtree(state)
    shutil.copytree(older, state)
    sandbox.start_controller()
    assert sandbox.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout.strip() == "RUNNING"
    run.process.send_signal(signal.SIGCONT)
    run.finish(0)
    point = run.point("a")
    assert (point["verdict"], point["job"]["job_id"], point["job"]["state"]) == ("success", job, "COMPLETED")
    squeue = ("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    # its nodes are cut off and never confirm the end
    until("it is cancelled", lambda: sandbox.run(*squeue, check=False).stdout.strip() in ("", "COMPLETING"))


def _runs_a_command(pid: int) -> bool:
    return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children())


def _is_forgotten(job_id: str, sandbox: Any) -> bool:
    return sandbox.run("scontrol", "show", "job", job_id, check=False).returncode != 0
