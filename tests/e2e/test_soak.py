"""Thousands of points on a real Slurm through hundreds of faults, and a ledger at the end that must balance.

A seed decides which faults come in which order (MBRIDGE_SOAK_SEED); how far the jobs are by then, the machine does.
MBRIDGE_SOAK_POINTS and MBRIDGE_SOAK_FAULTS say how much of it there is.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.drill, pytest.mark.timeout(3 * 3600)]

POINTS_PER_ROUND = 300
RUNNER = "settle_s = 3\nunknown_s = 20\nretries = 20\nmax_parallel = 40"
FAULTS = (
    *("driver", "driver", "driver", "stopped driver", "controller", "forgetful controller", "slurmd", "node"),
    *("accounting", "a user's requeue", "full disk"),
)
# Share of the calls of sbatch that go wrong, and how; see tests/e2e/test_sbatch_faults.py
SBATCH = """#!/bin/bash
real={real}
echo "$*" >> {directory}/calls
exec 9>>{directory}/lock; flock 9; n=$(wc -l < {directory}/calls); flock -u 9; exec 9>&-
RANDOM=$(({seed} + n))
error="sbatch: error: Batch job submission failed:"
case $((RANDOM % 30)) in
0) fault="accepted, unspecified error"; "$real" "$@" > /dev/null; echo "$error Unspecified error" >&2; rc=1 ;;
1) fault="wrong id"; "$real" "$@" > /dev/null; echo 1; rc=0 ;;
2) fault="cut id"; id=$("$real" "$@"); rc=$?; echo "${{id%?}}" ;;
3) fault="twice"; "$real" "$@" > /dev/null; "$real" "$@"; rc=$? ;;
4) fault="silent"; "$real" "$@" > /dev/null; rc=0 ;;
5) fault="timed out, accepted"; "$real" "$@" > /dev/null; echo "sbatch: error: Socket timed out" >&2; rc=1 ;;
6) fault="timed out, not accepted"; echo "sbatch: error: Socket timed out" >&2; rc=1 ;;
7) fault="accepted, driver killed"; "$real" "$@" > /dev/null; kill -9 $PPID; rc=1 ;;
8) fault="driver killed before"; kill -9 $PPID; exit 1 ;;
9) fault="accepted late"; {late} "$@"; echo "$error Message receive failure" >&2; rc=1 ;;
*) exec "$real" "$@" ;;
esac
echo "$fault" >> {directory}/faults
exit $rc
"""
LATE = """#!{python}
import os, subprocess, sys
with open(os.devnull, "r+b") as null:
    argv = ["bash", "-c", 'sleep 8; exec {real} "$@"', "bash", *sys.argv[1:]]
    subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)
"""


@dataclass
class Soak:
    """One cluster, its faults, and what was counted."""

    sandbox: Any
    rng: random.Random
    directory: Path
    counted: Counter[str] = field(default_factory=Counter)
    excluded: int = 0

    def fault(self, run: Any) -> None:
        """Let something go wrong, and right again."""
        name = self.rng.choice(FAULTS)
        self.counted[f"fault: {name}"] += 1
        getattr(self, f"_{name.replace(' ', '_').replace(chr(39), '')}")(run)

    def _driver(self, run: Any) -> None:
        run.process.kill()

    def _stopped_driver(self, run: Any) -> None:
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        run.process.send_signal(signal.SIGCONT)

    def _controller(self, run: Any) -> None:
        self.sandbox.kill_controller()
        time.sleep(self.rng.uniform(0, 3))
        self.sandbox.start_controller()

    def is_stuck(self) -> bool:
        """Return whether Slurm starts nothing on idle nodes: 22.05 may lose count of GPUs when its controller dies."""
        jobs = self.sandbox.run("squeue", "--noheader", "--format=%T %r", check=False).stdout.splitlines()
        return "PENDING Resources" in jobs and all(job.startswith("PENDING") for job in jobs)

    def restart_controller(self) -> None:
        self.sandbox.kill_controller()
        self.sandbox.start_controller()

    def undrain(self) -> None:
        """Return nodes to service, as an operator would: a forgetful controller gives ids of jobs that still run there,
        and Slurm drains such a node."""
        reasons = self.sandbox.run("sinfo", "--noheader", "--list-reasons", "--format=%n %E", check=False).stdout
        for line in reasons.splitlines():
            name, _, reason = line.partition(" ")
            if reason.startswith("Duplicate jobid"):
                self.counted["Slurm drained a node over an id that it gave twice"] += 1
                self.sandbox.resume(name)

    def _forgetful_controller(self, run: Any) -> None:
        self.sandbox.kill_controller(save=False)
        self.sandbox.start_controller()

    def _slurmd(self, run: Any) -> None:
        name = self.rng.choice(self.sandbox.node_names)
        self.sandbox.kill_slurmd(name)
        self.sandbox.revive(name)
        self.sandbox.resume(name)

    def _node(self, run: Any) -> None:
        if self.excluded >= 2:  # a run uses the nodes no more that have failed it
            return self._slurmd(run)
        self.excluded += 1
        name = self.rng.choice(self.sandbox.node_names)
        self.sandbox.crash(name)
        self.sandbox.revive(name)
        self.sandbox.resume(name)
        return None

    def _accounting(self, run: Any) -> None:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if (
                    b"slurmdbd" in entry.read_bytes()
                    and str(self.sandbox.directory).encode() in (entry.parent / "environ").read_bytes()
                ):
                    pid = int(entry.parent.name)
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(2)
                    os.kill(pid, signal.SIGCONT)
            except OSError:
                continue

    def _a_users_requeue(self, run: Any) -> None:
        shown = self.sandbox.run("squeue", "--noheader", "--states=RUNNING", "--format=%i", check=False).stdout.split()
        if shown:
            self.sandbox.run("scontrol", "requeue", self.rng.choice(shown), check=False)

    def _full_disk(self, run: Any) -> None:
        """Take the journal's right to be written: what a full disk does, on a machine where nobody can fill one."""
        for root in run.directory.glob("out/*"):
            subprocess.run(["chattr", "+i", str(root / "submissions.jsonl")], check=False, capture_output=True)
            time.sleep(1)
            subprocess.run(["chattr", "-i", str(root / "submissions.jsonl")], check=False, capture_output=True)


def bad_sbatch(directory: Path, sandbox: Any, seed: int) -> str:
    """Make an sbatch of which one call in three goes wrong; return the directory for PATH."""
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    (directory / "late").write_text(LATE.format(python=sys.executable, real=real))
    text = SBATCH.format(real=real, directory=directory, late=directory / "late", seed=seed)
    (directory / "sbatch").write_text(text)
    for name in ("late", "sbatch"):
        (directory / name).chmod(0o755)
    return str(directory)


def points_of(render: Callable[..., str], told: dict[str, Any], num_points: int) -> list[str]:
    """Return arrays of twenty points each, and single ones."""
    mbs = "mb = [1, 2, 4, 8]\ngb = [8, 16, 24, 32, 40]"
    arrays = [
        render(f"array{n}", told, run=f'time_limit = "1:{n:02}:00"', args=mbs, steps=4) for n in range(num_points // 25)
    ]
    singles = [
        render(f"single{n}", told, run=f'time_limit = "{n + 10}:00:00"', steps=4)
        for n in range(num_points - 20 * len(arrays))
    ]
    return [*arrays, *singles]


def drive(soak: Soak, run: Any, num_faults: int) -> Any:
    """Break things while the run goes on; take it up again whenever its driver has died; return its last driver."""
    left, looks = num_faults, 0
    while not (run.root / "journal.sqlite").exists():
        time.sleep(0.1)
    while True:
        time.sleep(soak.rng.uniform(0.5, 3.0))
        if run.process.poll() is None:
            if left > 0:
                left -= 1
                soak.fault(run)
            soak.undrain()
            looks = looks + 1 if soak.is_stuck() else 0
            if looks > 5:
                soak.counted["Slurm kept the GPUs of ended jobs until its controller was restarted"] += 1
                soak.restart_controller()
            continue
        if run.process.returncode in (0, 1):
            return run
        assert run.process.returncode in (-signal.SIGKILL, 3, 4), run.read_output()[-4000:]
        soak.counted[f"driver ended with {run.process.returncode}"] += 1
        run = run.resume()


def is_node_failure(statuses: Iterable[str | None]) -> bool:
    return any(json.loads(text)["state"] == "NODE_FAIL" for text in statuses if text)


def balance(soak: Soak, run: Any, ledger: Path, num_points: int) -> None:
    """Compare what was trained, by the jobs' own ledger, with what is counted."""
    trained: dict[str, list[str]] = {}
    for line in ledger.read_text().splitlines():
        directory, job_id = line.rsplit(" ", 1)
        trained.setdefault(str(Path(directory).relative_to(run.root)), []).append(job_id)
    points = run.points()
    assert len(points) == num_points
    verdicts = Counter(point["verdict"] for point in points.values())
    attempts = run.query("SELECT key, number, job_id, status, ending FROM attempts ORDER BY key, number")
    for key, point in points.items():
        jobs = trained.get(key, [])
        # What has just trained to its end may lose its node before it has told so; Slurm's word stands
        failed = {job_id for of, _, job_id, *status in attempts if of == key and is_node_failure(status)}
        lost = [job for job in jobs if job in failed]
        soak.counted["trained to the end on a node that failed then"] += len(lost)
        jobs = [job for job in jobs if job not in lost]
        assert len(jobs) <= 1, f"{key}: trained to its end by {jobs}; {[row for row in attempts if row[0] == key]}"
        if point["verdict"] == "success":
            assert jobs == [point["job"]["job_id"]], f"{key}: counted {point['job']}, trained by {jobs}"
        else:
            assert point["reasons"], key
    soak.counted["points"] += num_points
    soak.counted["trained to the end"] += sum(map(len, trained.values()))
    soak.counted.update({f"verdict {verdict}": count for verdict, count in verdicts.items()})
    soak.counted["attempts"] += len(attempts)
    soak.counted["attempts with a job"] += sum(row[2] is not None for row in attempts)
    soak.counted["jobs that lost their claim"] += sum(
        len(path.read_text().splitlines()) for path in run.root.rglob("not_counted.txt")
    )


def test_soak(
    new_cluster: Any, start_run: Any, stand_in_test: Callable[..., str], until: Any, tmp_path: Path, capsys: Any
) -> None:
    seed = int(os.environ.get("MBRIDGE_SOAK_SEED") or random.randrange(1 << 15))
    points = int(os.environ.get("MBRIDGE_SOAK_POINTS", "3000"))
    faults = int(os.environ.get("MBRIDGE_SOAK_FAULTS", "200"))
    num_rounds = max(1, round(points / POINTS_PER_ROUND))
    print(f"MBRIDGE_SOAK_SEED={seed}")
    started = time.monotonic()
    soak = Soak(new_cluster(nodes=6, accounting=True, extra_conf="SlurmdTimeout=6"), random.Random(seed), tmp_path)
    for number in range(num_rounds):
        (directory := tmp_path / str(number)).mkdir()
        ledger, soak.excluded = directory / "ledger", 0
        ledger.touch()
        tests = points_of(stand_in_test, {"step_s": 0.05, "ledger": str(ledger)}, points // num_rounds)
        path = bad_sbatch(directory, soak.sandbox, seed + number)
        run = drive(soak, start_run(soak.sandbox, tests, path=path, runner=RUNNER), faults // num_rounds)
        until("an empty queue", lambda: not soak.sandbox.run("squeue", "--noheader", check=False).stdout.strip())
        run.finish(timeout_s=60)
        balance(soak, run, ledger, points // num_rounds)
        soak.counted["calls of sbatch"] += len((directory / "calls").read_text().splitlines())
        wrong = (directory / "faults").read_text().splitlines() if (directory / "faults").exists() else []
        soak.counted.update(f"sbatch: {fault}" for fault in wrong)
        with capsys.disabled():
            print(f"\nround {number + 1} of {num_rounds}, {time.monotonic() - started:.0f} s, seed {seed}")
            print("\n".join(f"{count:7} {what}" for what, count in sorted(soak.counted.items())))
