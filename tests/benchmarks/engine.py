"""What watching jobs costs the controller, and what `mbridge run` costs over a bare sbatch.

    python -m tests.benchmarks.engine [JOBS] [REPETITIONS]

Slurm is real, a private one on this machine; the training program is the stand-in, so that the jobs cost next to
nothing and the difference is all mbridge's. The baseline, named in the output, is `sbatch --array` of the very same
script and run directories, waited for by asking squeue every quarter of a second.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.schedulers.interface import Job
from cloudai_mbridge.schedulers.slurm import SlurmClient
from tests.sandbox import SlurmSandbox

REPOSITORY = Path(__file__).parents[2]
COMMANDS = ("squeue", "sacct", "scontrol", "sinfo", "scancel", "sbatch")
ACTIVE = (1, 100, 1000)
WATCH_S = 10.0
TARGET = 1.10

SYSTEM = """name = "bench"
scheduler = "slurm"
default_partition = "main"
gpus_per_node = 8
python_executable = "{stand_in}"
{more}
[[partitions]]
name = "main"
"""
SCENARIO = """name = "bench"
[[Tests]]
id = "t"
name = "t"
description = "d"
test_template_name = "MegatronBridge"
iterations = {jobs}
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 5
"""


class Bench:
    """A cluster, and `mbridge` commands on it."""

    def __init__(self, sandbox: SlurmSandbox) -> None:
        self.sandbox = sandbox
        self.env = dict(sandbox.full_env)
        self.work = sandbox.directory / "bench"
        self.work.mkdir()
        self._number = 0

    def start(self, command: str, jobs: int, more: str = "", env: dict[str, str] | None = None) -> tuple[Path, float]:
        """Start a command on a scenario of so many runs; return its output directory and when it was started."""
        self._number += 1
        directory = self.work / str(self._number)
        directory.mkdir()
        stand_in = REPOSITORY / "tests" / "stand_in" / "training.py"
        (directory / "system.toml").write_text(SYSTEM.format(stand_in=stand_in, more=more))
        (directory / "scenario.toml").write_text(SCENARIO.format(jobs=jobs))
        files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/scenario.toml"]
        argv = [sys.executable, "-m", "cloudai_mbridge", command, *files, f"--output-dir={directory}/out"]
        with (directory / "output.txt").open("w") as output:
            started = time.perf_counter()
            self.process = subprocess.Popen(argv, stdout=output, stderr=output, env=env or self.env, cwd=REPOSITORY)
        return directory, started

    def finish(self, directory: Path) -> Path:
        """Wait for the command; return the root of the run."""
        if self.process.wait() != 0:
            sys.exit((directory / "output.txt").read_text())
        (root,) = (directory / "out").iterdir()
        return root

    def wait_for_jobs(self, *selection: str) -> None:
        while self.sandbox.run("squeue", "--noheader", *selection).stdout:
            time.sleep(0.25)


def counting_commands(directory: Path, env: dict[str, str]) -> dict[str, str]:
    """Return an environment in which every call of a Slurm command is one more line of `calls`."""
    directory.mkdir()
    for name in COMMANDS:
        real = shutil.which(name, path=env["PATH"])
        (directory / name).write_text(f'#!/bin/sh\necho {name} >> {directory}/calls\nexec {real} "$@"\n')
        (directory / name).chmod(0o755)
    return {**env, "PATH": f"{directory}:{env['PATH']}"}


def watching(bench: Bench) -> None:
    """Count the calls that a driver makes while its jobs wait, and time what it does at each look."""
    print(
        f"\nControllers' calls while N jobs are active (all held; {WATCH_S:g} s of `mbridge run`, monitor_interval 1 s)"
    )
    print(f"{'active':>8} {'looks':>6} {'calls':>6} {'calls/look':>11} {'calls by command':<28} {'s/look':>14}")
    for active in ACTIVE:
        bin_directory = bench.work / f"bin{active}"
        env = counting_commands(bin_directory, bench.env)
        directory, _ = bench.start("run", active, 'monitor_interval = 1\nextra_sbatch_args = ["--hold"]', env)
        output = directory / "output.txt"
        while output.read_text().count(": PENDING") < active:
            if bench.process.poll() is not None:
                sys.exit(output.read_text())
            time.sleep(0.1)
        time.sleep(2)
        calls = bin_directory / "calls"
        calls.write_text("")
        time.sleep(WATCH_S)
        counts = Counter(calls.read_text().split())
        looks, total = counts["squeue"], counts.total()
        times = times_to_poll(bench, directory)
        bench.process.terminate()
        bench.process.wait()
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        spread = f"{statistics.median(times):.3f} ±{statistics.stdev(times):.3f}"
        print(f"{active:8} {looks:6} {total:6} {total / looks:11.2f} {shown:<28} {spread:>14}")
        bench.wait_for_jobs()


def times_to_poll(bench: Bench, directory: Path) -> list[float]:
    """Time looks at the active jobs, as a driver does them."""
    os.environ.update({name: bench.env[name] for name in ("SLURM_CONF", "PATH")})
    (root,) = (directory / "out").iterdir()
    shown = bench.sandbox.run("squeue", "--noheader", "--array", "--Format=JobArrayID:|").stdout
    ids = [line.strip().rstrip("|") for line in shown.splitlines()]
    jobs = [Job(job_id, job_id, "", root) for job_id in ids]
    client = SlurmClient(load_system(directory / "system.toml"))  # type: ignore[arg-type]
    times = []
    for _ in range(7):
        started = time.perf_counter()
        seen = client.poll(jobs)
        times.append(time.perf_counter() - started)
        assert len(seen) == len(jobs)
    return times


def driving(bench: Bench, jobs: int, repetitions: int) -> None:
    """Compare whole runs with what Slurm takes for the same array."""
    print(f"\nWall time of {jobs} trivial jobs (s), {repetitions} interleaved repetitions")
    times: dict[str, list[float]] = {"mbridge run": [], "sbatch --array": []}
    for number in range(repetitions):
        directory, _ = bench.start("dry-run", jobs)
        root = bench.finish(directory)
        started = time.perf_counter()
        array = ("sbatch", "--parsable", f"--array=0-{jobs - 1}", f"--chdir={root}", "arrays/0/array.sbatch")
        job_id = bench.sandbox.run(*array, cwd=root).stdout.strip()
        bench.wait_for_jobs(f"--jobs={job_id}")
        times["sbatch --array"].append(time.perf_counter() - started)
        num_ok = sum(path.read_text() == "0\n" for path in root.glob("t/*/*/exit_code.txt"))
        assert num_ok == jobs, f"{num_ok} of the baseline's jobs succeeded"

        directory, started = bench.start("run", jobs)
        bench.finish(directory)
        times["mbridge run"].append(time.perf_counter() - started)
        bench.wait_for_jobs()
        print(f"  repetition {number + 1}: " + ", ".join(f"{name} {each[-1]:.1f}" for name, each in times.items()))
    for name, each in times.items():
        print(f"{name:<16} median {statistics.median(each):6.1f}, {min(each):.1f} to {max(each):.1f}")
    ratio = statistics.median(times["mbridge run"]) / statistics.median(times["sbatch --array"])
    print(f"ratio            {ratio:.3f}; target {TARGET:.2f}; baseline: sbatch --array of the same script")


def main(jobs: int = 500, repetitions: int = 3) -> None:
    directory = tempfile.mkdtemp(dir="/tmp", prefix="mb-")  # short, for unix sockets
    sandbox = SlurmSandbox(directory, nodes=8, gpus=8, cpus=8, extra_conf="MinJobAge=300", die_with_parent=True)
    try:
        with sandbox:
            print(f"a private Slurm of 8 nodes with 8 CPUs on this machine, which has {os.cpu_count()}")
            bench = Bench(sandbox)
            watching(bench)
            driving(bench, jobs, repetitions)
    finally:
        sandbox.stop(purge=True)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
