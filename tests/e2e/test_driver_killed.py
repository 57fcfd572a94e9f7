"""Whenever the driver is killed, `mbridge resume` goes on: nothing is lost, and nothing runs twice.

What ran is counted from Slurm's side, and by the line that every start of a job's script leaves behind.
"""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

FIELDS = "JobArrayID:|,State:|,Name:|,WorkDir:|"
SETTLE_S = 15.0  # the runner's own: how long it looks for a submission that never reached Slurm
RUNNER = "max_parallel = 5"


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=3)


def forty_points(test: Callable[..., str]) -> list[str]:
    """Return four arrays of six points one after the other, thirteen single points, and three on two nodes."""
    batches = "gb = 32\nmb = [1, 2, 4]\nseq_length = [64, 128]"
    quick, slow = {"step_s": 0.1}, {"step_s": 0.25}
    tests = [
        test(
            f"array{n}",
            quick if n % 2 else slow,
            run=f'time_limit = "0:1{n}:00"\n' + (after(f"array{n - 1}") if n else ""),
            args=batches,
        )
        for n in range(4)
    ]
    # runs that need the same resources would share an array, and a time limit of its own makes a need of its own
    tests += [test(f"single{n}", quick if n % 2 else slow, run=f'time_limit = "1:{n:02}:00"') for n in range(13)]
    tests += [test("pair", slow, num_nodes=2, args="mb = [1, 2]\ngb = 4"), test("two", num_nodes=2, run=after("pair"))]
    return tests


def after(test_id: str) -> str:
    return f'[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "{test_id}"\n'


def jobs_of(run: Any, sandbox: Any) -> list[tuple[str, str, str]]:
    """Return (run key, job id, state) of every job or array task that Slurm has ever had from a run's directory."""
    found = []
    shown = sandbox.run("squeue", "--noheader", "--array", "--states=all", "--Format", FIELDS).stdout
    for line in shown.splitlines():
        job_id, state, name, directory = (field.strip() for field in line.strip().rstrip("|").split("|"))
        path = Path(directory)
        if "_" in job_id:
            number = name.partition(".")[0].rpartition("-array-")[2]
            path = path / "arrays" / number / job_id.partition("_")[2]
        if path.resolve().is_relative_to(run.root):
            found.append((str(path.resolve().relative_to(run.root)), job_id, state))
    return found


def check_exactly_once(run: Any, sandbox: Any, num_points: int) -> None:
    """Check the report, the markers and Slurm's own list: every point one success of one job, and nothing besides."""
    points = run.points()
    assert len(points) == len(run.report["points"]) == num_points
    assert {key: point["verdict"] for key, point in points.items()} == dict.fromkeys(points, "success")
    jobs = jobs_of(run, sandbox)
    assert sorted((key, state) for key, _, state in jobs) == sorted((key, "COMPLETED") for key in points)
    assert {key: point["job"]["job_id"] for key, point in points.items()} == {key: id_ for key, id_, _ in jobs}
    for key, point in points.items():
        started = (run.root / key / "started.txt").read_text().splitlines()
        assert len(started) == 1, f"{key}: {started}"
        assert started[0].startswith(f"job={point['job']['job_id']} ")
        assert not list((run.root / key).glob("attempt-*"))
    assert not sandbox.run("squeue", "--noheader").stdout


def where_killed(run: Any) -> str:
    """Tell from the journal what a killed driver was doing."""
    roots = [path for path in run.directory.glob("out/*") if (path / "plan.json").exists()]
    if not roots or not (roots[0] / "journal.sqlite").exists():
        return "before its first entry"
    journal = sqlite3.connect(roots[0] / "journal.sqlite", timeout=1500)
    with closing(journal) as db, suppress(sqlite3.OperationalError):
        if db.execute("SELECT 1 FROM attempts WHERE job_id IS NULL").fetchone():
            return "in a submission"
    return "elsewhere"


class Killer:
    """Kills drivers at random moments, most of them around submissions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.places: list[str] = []

    def kill(self, run: Any) -> bool:
        """Kill a driver that has just been started; return False if it had ended before."""
        kind = self.random.choice(("start", "lock", "lock", "any"))
        if self.places[-4:] == ["in a submission"] * 4:  # it must be let find out what became of that
            kind = "settled"
        if kind == "lock":
            self._wait_for_lock(run)
        low, high = {"start": (0.2, 0.9), "lock": (0.0, 0.5), "any": (0.0, 3.0), "settled": (0.5, 3.0)}[kind]
        self._wait(run, self.random.uniform(low, high) + (SETTLE_S + 1 if kind == "settled" else 0.0))
        run.process.kill()
        if run.process.wait() != -signal.SIGKILL:
            return False
        self.places.append(where_killed(run))
        return True

    def _wait(self, run: Any, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(seconds)

    def _wait_for_lock(self, run: Any) -> None:
        """Wait until it drives its directory: then it looks, and submits."""
        words = f"process {run.process.pid} on"
        end = time.monotonic() + 10
        while run.process.poll() is None and time.monotonic() < end:
            if any(words in path.read_text() for path in run.directory.glob("out/*/driver.lock")):
                return
            time.sleep(0.005)


def slow_sbatch(directory: Path, sandbox: Any) -> str:
    """Make an sbatch that takes its time, as one does whose controller is busy; return the directory for PATH.

    One in four dies with a driver that is killed before it has asked the controller, as if their machine had died.
    """
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    program = directory / "sbatch"
    program.write_text(
        f"""#!/bin/bash
sleep 0.$((RANDOM % 4))
if ((RANDOM % 4 == 0)) && [ "$(ps -o ppid= -p $$ | tr -d ' ')" != $PPID ]; then exit 1; fi
answer=$({real} "$@")
code=$?
sleep 0.$((RANDOM % 4))
echo "$answer"
exit $code
"""
    )
    program.chmod(0o755)
    return str(directory)


def kill_and_resume(start_run: Any, tests: list[str], sandbox: Any, path: str, kills: int) -> None:
    """Kill drivers of as many sweeps as that takes, and check each sweep at its end."""
    seed = int(os.environ.get("MBRIDGE_KILL_SEED") or random.randrange(1 << 32))
    print(f"MBRIDGE_KILL_SEED={seed}")  # pytest shows it with a failure
    killer = Killer(seed)
    num_sweeps = 0
    while len(killer.places) < kills:
        num_sweeps += 1
        run = start_run(sandbox, tests, runner=RUNNER, path=path)
        while len(killer.places) < kills and killer.kill(run):
            is_written = any(run.directory.glob("out/*/plan.json"))
            run = run.resume() if is_written else start_run(sandbox, tests, runner=RUNNER, path=path)
        run.finish(0, timeout_s=200)
        check_exactly_once(run, sandbox, 40)
    print(f"{len(killer.places)} kills in {num_sweeps} sweeps: {dict(Counter(killer.places))}")


def test_ten_kills(start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path) -> None:
    path = slow_sbatch(tmp_path, sandbox)
    kill_and_resume(start_run, forty_points(stand_in_test), sandbox, path, kills=10)


@pytest.mark.drill
def test_fifty_kills(start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path) -> None:
    path = slow_sbatch(tmp_path, sandbox)
    kill_and_resume(start_run, forty_points(stand_in_test), sandbox, path, kills=50)


# ---- the moments that matter most, exactly

MOMENTS = {
    "between_the_intent_and_sbatch": "kill -9 $PPID\n exit 1",
    "between_sbatch_and_the_journal": '{real} "$@" > /dev/null\n kill -9 $PPID\n exit 0',
    "with_sbatch_still_in_flight": 'kill -9 $PPID\n sleep 2\n exec {real} "$@"',
}


def deadly_sbatch(directory: Path, sandbox: Any, moment: str, calls: tuple[int, ...]) -> str:
    """Make an sbatch that kills its caller in some of its calls; return the directory for PATH."""
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    program = directory / "sbatch"
    program.write_text(
        f"""#!/bin/bash
echo "$$" >> {directory}/calls
if [[ " {" ".join(map(str, calls))} " == *" $(wc -l < {directory}/calls) "* ]]; then
 {MOMENTS[moment].format(real=real)}
fi
exec {real} "$@"
"""
    )
    program.chmod(0o755)
    return str(directory)


@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        ("between_the_intent_and_sbatch", (1,)),
        ("between_the_intent_and_sbatch", (2,)),
        ("between_sbatch_and_the_journal", (1, 2, 3)),
        ("with_sbatch_still_in_flight", (1, 2, 3)),
    ],
)
def test_killed_at_a_submission(
    start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path, moment: str, calls: tuple[int, ...]
) -> None:
    """The first call submits an array, the others a single job each."""
    tests = [
        stand_in_test("array", {"step_s": 0.1}, args="gb = 8\nmb = [1, 2, 4, 8]"),
        stand_in_test("single", run='time_limit = "1:00:00"'),
        stand_in_test("later", run='time_limit = "2:00:00"\n' + after("single")),
    ]
    path = deadly_sbatch(tmp_path, sandbox, moment, calls)
    run = start_run(sandbox, tests, path=path)
    for _ in calls:
        run.finish(-signal.SIGKILL)
        assert where_killed(run) == "in a submission"
        run = run.resume()
    run.finish(0)
    check_exactly_once(run, sandbox, 6)
    num_lost = len(calls) if moment == "between_the_intent_and_sbatch" else 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 3 + num_lost
    assert ("the scheduler does not know it" in str(run.query("SELECT text FROM events"))) == bool(num_lost)


def test_killed_while_it_writes_its_files(start_run: Any, stand_in_test: Any, sandbox: Any, mbridge: Any) -> None:
    """A directory that is not complete is none: nothing of it is ever submitted."""
    tests = [stand_in_test("many", run="iterations = 300")]
    outcomes = set()
    for delay_s in (0.0, 0.02, 0.05, 0.1):
        run = start_run(sandbox, tests, runner="max_parallel = 1")
        while not any(run.directory.glob("out/*/*")):
            time.sleep(0.001)
        time.sleep(delay_s)
        run.process.kill()
        run.process.wait()
        if any(run.directory.glob("out/*/journal.sqlite")):
            sandbox.run("scancel", f"--user={os.getuid()}")
            continue
        is_complete = len(list(run.root.glob("many/*/*/job.sbatch"))) == 300
        done = mbridge("status", run.root, env=run.env)
        outcomes.add((is_complete, done.returncode))
        if not is_complete:
            assert done.returncode == 6, done.stdout
            assert "plan.json is missing" in mbridge("resume", run.root, env=run.env).stderr
    assert (False, 6) in outcomes
