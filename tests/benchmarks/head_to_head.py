"""CloudAI and mbridge on the same 12 points, one of which fails, on one Slurm sandbox: time, Slurm calls, exit codes.

    make head-to-head                       # in the environment of `make interop`
    python -m tests.benchmarks.head_to_head [REPETITIONS]

The first two ways read the same files, a sweep of CloudAI's MegatronBridge workload. Megatron-Bridge's launcher is a
stand-in that imports NeMo-Run as the real one does, submits a Slurm job of about a second and waits for it; the point
of the largest batch runs out of memory after two of five steps. The other two ways train the embedded loop, with a
stand-in for the trainer of the same length. Slurm calls are counted by wrappers on PATH, those inside of jobs left out;
the launcher's own are the same for both. CloudAI asks for its jobs every `monitor_interval` seconds: 1 here, the least
that it takes; its default is 60.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.megatron_bridge.release import repo_path, venv_path
from tests.sandbox import SlurmSandbox

TRAINER = Path(__file__).parents[1] / "stand_in/training.py"
MEGATRON_BRIDGE = ("https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "v0.3.0")
NEMO_RUN = ("https://github.com/NVIDIA-NeMo/Run.git", "main")
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "srun", "scancel", "sacctmgr", "sstat")
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
CACHED = "--enable-cache-without-check"

LAUNCHER = """
import os, subprocess, sys, time
import nemo_run  # as the real one: seconds of CPU time
fails = sys.argv[sys.argv.index("-gb") + 1] == "96"
job = os.environ["NEMORUN_HOME"] + "/job.sh"
log = os.environ["NEMORUN_HOME"] + "/log.out"
with open(job, "w") as file:
    file.write(f'''#!/bin/bash
trap "touch {log}.over" EXIT
for step in 1 2 3 4 5; do
  sleep 0.2
  echo "Step Time : 1.2${{step}}s GPU utilization: 456.7MODEL_TFLOP/s/GPU"
  if [ {int(fails)} = 1 ] && [ $step = 2 ]; then
    echo "OUT_OF_MEMORY" >&2
    exit 1
  fi
done
''')
partition = sys.argv[sys.argv.index("-p") + 1]
options = ["--nodes=1", "--ntasks=1", "--gpus-per-node=4", "--output=" + log, "-p", partition]
subprocess.run(["sbatch", *options, job])
while not os.path.exists(log + ".over"):
    time.sleep(0.1)
print(open(log).read())
""".replace("OUT_OF_MEMORY", OUT_OF_MEMORY)
PYTHON = '#!/bin/sh\n# CloudAI calls pip before every point\n[ "$2" = pip ] && exit 0\nexec {python} "$@"\n'
COUNTED = '#!/bin/sh\n[ -n "$SLURM_JOB_ID" ] || echo {name} >> {calls}\nexec {program} "$@"\n'

SYSTEM = """name = "sandbox"
scheduler = "slurm"
install_path = "install"
output_path = "results"
default_partition = "main"
gpus_per_node = 4
mpi = "none"
monitor_interval = 1
{more}
[[partitions]]
name = "main"
"""
UPSTREAM = f"""name = "points"
description = "12 points; the one of the largest batch fails"
test_template_name = "MegatronBridge"

[[git_repos]]
url = "{MEGATRON_BRIDGE[0]}"
commit = "{MEGATRON_BRIDGE[1]}"

[cmd_args]
gpu_type = "h100"
model_family_name = "llama"
model_recipe_name = "llama3_8b"
num_gpus = 4
max_steps = 5
tp = 1
mb = 1
gb = [8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96]
"""
TOLD = [json.dumps({"step_s": 0.2, "n": number}) for number in range(11)]
FAILS = json.dumps({"step_s": 0.2, "at": 2, "say": OUT_OF_MEMORY, "exit": 1})
EMBEDDED = f"""name = "points"
description = "12 points; the last one fails"
test_template_name = "TEMPLATE"

[cmd_args]
LAUNCHER
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 4
max_steps = 5

[extra_env_vars]
STAND_IN = {json.dumps([*TOLD, FAILS])}
"""
SCENARIO = 'name = "sweep"\n\n[[Tests]]\nid = "points"\ntest_name = "points"\nnum_nodes = 1\n'


@dataclass(frozen=True)
class Way:
    """A tool, its command line, the test that it reads, its options, and a line of its own in the system file."""

    name: str
    program: str
    test: str
    options: tuple[str, ...] = ()
    system: str = ""


CLOUDAI = Way("CloudAI, MegatronBridge", "from cloudai.cli import main; main()", UPSTREAM, (CACHED,))
WAYS = (
    CLOUDAI,
    Way("mbridge, the same files", "from cloudai_mbridge.cli import main; main()", UPSTREAM),
    Way(
        "mbridge, embedded loop",
        "from cloudai_mbridge.cli import main; main()",
        EMBEDDED.replace("TEMPLATE", "MegatronBridge").replace("LAUNCHER", 'launcher = "embedded"'),
        system=f'python_executable = "{TRAINER}"\n',
    ),
    Way(
        "CloudAI, MegatronBridgeEmbedded",
        "from cloudai_mbridge.integrations.cloudai import main; main()",
        EMBEDDED.replace("TEMPLATE", "MegatronBridgeEmbedded").replace("LAUNCHER", ""),
        (CACHED,),
    ),
)


@dataclass(frozen=True)
class Seen:
    """One run: its time, its Slurm calls by command, its exit code and what it said of the points."""

    wall_s: float
    calls: Counter[str]
    exit_code: int
    points: str


def install(directory: Path) -> None:
    """Put the stand-in launcher where both tools look for Megatron-Bridge, and a Python for it."""
    launcher = repo_path(directory, *MEGATRON_BRIDGE) / "scripts/performance/setup_experiment.py"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(LAUNCHER)
    python = venv_path(directory, *NEMO_RUN) / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)


def count_calls(directory: Path, calls: Path, path: str) -> None:
    """Write a wrapper for every Slurm command."""
    directory.mkdir()
    for name in COMMANDS:
        if program := shutil.which(name, path=path):
            (directory / name).write_text(COUNTED.format(name=name, calls=calls, program=program))
            (directory / name).chmod(0o755)


def run(way: Way, directory: Path, env: Mapping[str, str]) -> Seen:
    """Run one way in a directory of its own."""
    (directory / "tests").mkdir(parents=True)
    (directory / "system.toml").write_text(SYSTEM.format(more=way.system))
    (directory / "tests/points.toml").write_text(way.test)
    (directory / "scenario.toml").write_text(SCENARIO)
    install(directory / "install")
    calls = directory / "calls.txt"
    calls.touch()
    count_calls(directory / "bin", calls, env["PATH"])
    files = ["--system-config=system.toml", "--tests-dir=tests", "--test-scenario=scenario.toml"]
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", way.program, "run", *files, *way.options],
        cwd=directory,
        env={**env, "PATH": f"{directory / 'bin'}:{env['PATH']}", "MBRIDGE_PYTHON": str(TRAINER), "HF_TOKEN": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.monotonic() - start
    (directory / "output.txt").write_text(ended.stdout + ended.stderr)
    return Seen(wall_s, Counter(calls.read_text().split()), ended.returncode, points_of(directory, ended.stdout))


def points_of(directory: Path, output: str) -> str:
    """Return how many points the tool itself calls good and bad."""
    if "│ PASSED │" in output or "│ FAILED │" in output:
        return f"{output.count('│ PASSED │')} PASSED, {output.count('│ FAILED │')} FAILED"
    reports = list(directory.glob("results/*/report.json"))
    verdicts = Counter(each["verdict"] for path in reports for each in json.loads(path.read_text())["points"])
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items(), reverse=True)) or "none"


def main(repetitions: int) -> None:
    """Run every way in turn, `repetitions` times, and print the figures and their ratios to CloudAI's."""
    top = Path(tempfile.mkdtemp(dir="/tmp", prefix="h2h-"))
    seen: dict[str, list[Seen]] = {way.name: [] for way in WAYS}
    with SlurmSandbox(top / "c", nodes=2, gpus=4, accounting=True, die_with_parent=True) as sandbox:
        env = {**os.environ, **sandbox.env}
        for repetition in range(repetitions):
            for number, way in enumerate(WAYS):
                seen[way.name].append(run(way, top / f"{repetition}-{number}", env))
    print(f"12 points, one of which fails; 2 nodes of 4 GPUs, 4 GPUs a point; n = {repetitions}; {os.cpu_count()} CPUs")
    theirs = seen[CLOUDAI.name]
    for way in WAYS:
        print_way(way.name, seen[way.name], theirs)
    print(f"output of every run: {top}")


def print_way(name: str, runs: list[Seen], theirs: list[Seen]) -> None:
    """Print the medians, the spread, and how many times less time and calls than CloudAI's."""
    walls, calls = [each.wall_s for each in runs], [each.calls.total() for each in runs]
    wall, call = statistics.median(walls), statistics.median(calls)
    ratio = statistics.median(each.wall_s for each in theirs) / wall
    fewer = statistics.median(each.calls.total() for each in theirs) / max(call, 1)
    said = " | ".join(sorted({f"exit {each.exit_code}, {each.points}" for each in runs}))
    print(f"{name}: {wall:.1f} s ({min(walls):.1f}-{max(walls):.1f}), {call:g} Slurm calls, {said}")
    print(f"  {ratio:.1f} times less time, {fewer:.1f} times fewer calls; {dict(runs[-1].calls.most_common())}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
