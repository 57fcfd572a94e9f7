"""A run that is left to Slurm: at once with --detach, or from a terminal, whatever happens to that."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.terminal import Terminal
from tests.golden import Sentence

on_slurm = pytest.mark.slurm
AFTER = '[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "one"\n'


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=2)


def waiting(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """Return what to tell the stand-in, and the file on which it then waits."""
    return {"at": 2, "wait_for": str(tmp_path / "go"), "ledger": str(tmp_path / "ledger")}, tmp_path / "go"


def check_trained_once(run: Any, ledger: Path, num_points: int) -> None:
    points = run.points()
    assert {key: point["verdict"] for key, point in points.items()} == dict.fromkeys(points, "success")
    assert len(points) == num_points
    trained = sorted(Path(line.split()[0]).relative_to(run.root).as_posix() for line in ledger.read_text().splitlines())
    assert trained == sorted(points)
    assert {len(point["attempts"]) for point in points.values()} == {1}


@on_slurm
def test_detach_submits_and_resume_takes_back(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, tmp_path: Path
) -> None:
    """What is ready is submitted, in arrays and one by one; what depends on it waits for `mbridge resume`."""
    told, go = waiting(tmp_path)
    (completed := tmp_path / "completed").mkdir()
    tests = [
        stand_in_test("one", told, args="gb = 8\nmb = [1, 2, 4]"),
        stand_in_test("two", told, run='time_limit = "1:00:00"'),
        stand_in_test("last", told, run=AFTER),
    ]
    hook = f'on_completion = {{ command = ["touch", "{completed}/yes"] }}'
    whole_nodes = 'extra_sbatch_args = ["--exclusive"]'
    run = start_run(sandbox, tests, runner=hook, system=whole_nodes, args=["--detach"]).finish(0)
    assert "detached: 4 jobs left to the scheduler, 1 run not submitted yet" in run.stdout
    assert run.stdout.splitlines()[-1].endswith(f"continue with: mbridge resume {run.root}")
    assert not (run.root / "report.json").exists()
    assert not (completed / "yes").exists(), "the run has not ended"
    jobs = run.jobs()
    assert len(jobs) == 4
    names = sandbox.run("squeue", "--noheader", "--array", "--format=%j").stdout.split()
    assert sorted(name.rpartition(".")[0].removeprefix(f"mbridge-{run.root.name}-") for name in names) == [
        *["one-array-0"] * 3,
        "two-single-0",
    ]

    run.command("resume", "--detach").finish(0)
    assert run.jobs() == jobs, "nothing was ready, so nothing was submitted"
    go.touch()
    run = run.resume().finish(0)
    assert jobs.items() <= run.jobs().items()
    check_trained_once(run, tmp_path / "ledger", 5)
    assert {point["job"]["gpus"] for point in run.points().values()} == {4}
    assert (completed / "yes").exists()


@on_slurm
def test_detach_waits_for_a_submission_in_doubt(
    start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path
) -> None:
    """sbatch submits and answers with an error: the job is found before mbridge leaves it."""
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    (tmp_path / "sbatch").write_text(
        f'#!/bin/bash\n[ -e {tmp_path}/lied ] && exec {real} "$@"\n'
        f'touch {tmp_path}/lied\n{real} "$@" >/dev/null\n'
        "echo 'sbatch: error: Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    (tmp_path / "sbatch").chmod(0o755)
    told, go = waiting(tmp_path)
    run = start_run(sandbox, [stand_in_test("one", told)], args=["--detach"], path=str(tmp_path)).finish(0)
    assert "detached: 1 job left" in run.stdout
    assert len(run.jobs()) == 1
    go.touch()
    check_trained_once(run.resume().finish(0), tmp_path / "ledger", 1)


def test_without_a_scheduler_it_is_refused(start_run: Any, stand_in_test: Any, sentence: Sentence) -> None:
    system = 'name = "l"\nscheduler = "local"\n'
    run = start_run(None, [stand_in_test("one")], args=["--detach"], whole_system=system).finish(2)
    sentence(run.stderr)
    assert not (run.directory / "out").exists()


@on_slurm
def test_at_a_terminal_one_signal_asks_and_two_cancel(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, tmp_path: Path, nothing_left: Any
) -> None:
    told, _ = waiting(tmp_path)
    run = start_run(sandbox, [stand_in_test("one", told)], terminal=(24, 80))
    terminal: Terminal = run.process
    run.wait_for_step("one", 2)
    terminal.type(b"\x03")
    question = "press Ctrl-C again within 10 s to cancel the jobs; Ctrl-\\ detaches and leaves them"
    until("the question", lambda: question in " ".join(terminal.text().split()))
    assert terminal.poll() is None
    assert sandbox.run("squeue", "--noheader").stdout
    terminal.type(b"\x03")
    assert terminal.wait(600) == 130
    assert {point["verdict"] for point in run.points().values()} == {"cancelled"}
    nothing_left(sandbox)


@on_slurm
@pytest.mark.parametrize("how", ["quit", "hang up"])
def test_leaving_a_terminal_leaves_the_jobs(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, tmp_path: Path, how: str
) -> None:
    told, go = waiting(tmp_path)
    run = start_run(sandbox, [stand_in_test("one", told), stand_in_test("last", told, run=AFTER)], terminal=(24, 80))
    job = run.wait_for_step("one", 2)
    if how == "quit":
        run.process.type(b"\x1c")
        assert run.process.wait(600) == 0
        assert f"mbridge resume {run.root}" in run.process.text().replace("\n", "")
    else:
        run.process.close()
        assert run.process.wait(600) == -signal.SIGHUP
    assert sandbox.run("squeue", "--noheader", "--format=%i %T").stdout.split() == [job, "RUNNING"]
    go.touch()
    run = run.resume().finish(0)
    assert run.jobs()["one/single/0"] == job
    check_trained_once(run, tmp_path / "ledger", 2)
