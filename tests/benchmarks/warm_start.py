"""How long the sweep of `make run` takes with and without the warm start, and whether its losses are the same bits.

    python tests/benchmarks/warm_start.py [--rounds N]

Runs alternate, as other work on the machine changes. CPU time is that of all processes, the fork server included.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[2]
SYSTEM = REPOSITORY / "systems" / "local.toml"
SCENARIO = REPOSITORY / "conf" / "scenarios" / "gpt_tiny_sweep.toml"
_PR_SET_CHILD_SUBREAPER = 36


class Run(NamedTuple):
    """One run of the sweep. losses: point -> loss and gradient norm of its steps."""

    wall_s: float
    cpu_s: float
    losses: dict[str, list[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the server's CPU time counts when it ends
    pairs = []
    for number in range(rounds):
        first = number % 2 == 0
        runs = {warm: measure(warm) for warm in (first, not first)}
        pairs.append((runs[True], runs[False]))
        print(f"warm {_figures(runs[True])}, cold {_figures(runs[False])}", flush=True)
    for what in ("wall_s", "cpu_s"):
        ratios = [getattr(warm, what) / getattr(cold, what) for warm, cold in pairs]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{what}: warm/cold {statistics.median(ratios):.3f} (median of {rounds}; {spread})")
    every = [run.losses for pair in pairs for run in pair]
    if any(losses != every[0] for losses in every):
        sys.exit("the losses differ")
    print(f"losses of {len(every[0])} points are bit-equal in {len(every)} runs")


def measure(warm: bool) -> Run:
    """Run the sweep in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        system = Path(directory, "system.toml")
        system.write_text(f"{SYSTEM.read_text()}warm_start = {str(warm).lower()}\n")
        options = {
            "system-config": system,
            "tests-dir": REPOSITORY / "test_defs",
            "test-scenario": SCENARIO,
            "output-dir": directory,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        cpu_s, start = _cpu_s(), time.monotonic()
        subprocess.run([sys.executable, "-m", "cloudai_mbridge", "run", *words], check=True, capture_output=True)
        wall_s = time.monotonic() - start
        _reap()
        (report,) = Path(directory).glob("*/report.json")
        points = [point for point in json.loads(report.read_text())["points"] if point["steps"]]
        losses = {point["key"]: [(step["loss"], step["grad_norm"]) for step in point["steps"]] for point in points}
        return Run(wall_s, _cpu_s() - cpu_s, losses)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _reap() -> None:
    """Wait for what the run has left: the server, which ends with it."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


def _figures(run: Run) -> str:
    return f"{run.wall_s:.1f} s ({run.cpu_s:.1f} s of CPU)"


if __name__ == "__main__":
    main()
