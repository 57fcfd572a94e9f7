"""CPU time of commands that run nothing, each ten times by turns, and as a multiple of an empty Python program's."""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SWEEP = ("--tests-dir", "test_defs", "--system-config", "systems/local.toml")
SCENARIO = "conf/scenarios/gpt_tiny_sweep.toml"
ROUNDS = 10


def cpu_s(*arguments: str) -> float:
    """Return the user and system time of `python ARGUMENT...`."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        mbridge = ("-m", "cloudai_mbridge")
        programs = {
            "python -c pass": ("-c", "pass"),
            "mbridge --help": (*mbridge, "--help"),
            "mbridge verify-configs": (*mbridge, "verify-configs", SCENARIO, *SWEEP),
            "mbridge dry-run": (*mbridge, "dry-run", "--test-scenario", SCENARIO, *SWEEP, "--output-dir", directory),
        }
        found: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(ROUNDS):
            for name, arguments in programs.items():
                found[name].append(cpu_s(*arguments))
    empty = statistics.median(found["python -c pass"])
    for name, times in found.items():
        median = statistics.median(times)
        print(f"{name:24} {median:.3f} s ({min(times):.3f} to {max(times):.3f}), {median / empty:.1f} x")


if __name__ == "__main__":
    main()
