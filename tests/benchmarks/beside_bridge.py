"""The cost of a step in our loop and in Megatron-Bridge's, by turns: python tests/benchmarks/beside_bridge.py

By hand, with the Python of `make bridge-loop`. Both loops train one model with the same layers on the same samples, one
rank and one thread, and log every step; Megatron-Bridge's default is every hundredth. Runs alternate, since the machine
drifts more than the loops differ: compare pairs. On a GPU Python's part of a step is another one.

Printed for each pair: the CPU time of a step in ms, as the kernel counts it for the process between two lines of its
log, and the median of the elapsed times in the log, each with the ratio. Other work on the machine moves the second.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.interop.bridge_loop.conftest import why_skipped

STEPS, LEFT_OUT = 150, 20
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_THEIR_PROGRAM = Path(__file__).parents[1] / "interop" / "bridge_loop" / "train_upstream.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4)
    pairs = parser.parse_args().pairs
    if missing := why_skipped():
        raise SystemExit(f"Megatron-Bridge's loop cannot run: {missing}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="mbridge-beside-") as directory:
        case = {"train": {"train_iters": STEPS, "global_batch_size": 1}, "layers": "ours"}
        files = {"yaml": f"{directory}/theirs.yaml", "notes": f"{directory}/notes.json"}
        Path(directory, "case.json").write_text(json.dumps({**case, **files}))
        for number in range(1, pairs + 1):
            theirs = _train([str(_THEIR_PROGRAM), "case.json"], directory)
            ours = _train(["-m", "cloudai_mbridge.training", "--config", "theirs.yaml"], directory)
            rows.append([mine / other for mine, other in zip(ours, theirs, strict=True)])
            both = zip(("CPU", "elapsed"), theirs, ours, rows[-1], strict=True)
            words = (f"{name} {other:.2f} and {mine:.2f} ms, {ratio:.3f}" for name, other, mine, ratio in both)
            print(f"{number}: Megatron-Bridge's and ours: {'; '.join(words)}", flush=True)
    for name, ratios in zip(("CPU", "elapsed"), zip(*rows, strict=True), strict=True):
        middle = statistics.median(ratios)
        print(f"ratio ours / Megatron-Bridge, {name}: median {middle:.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def _train(program: Sequence[str], directory: str) -> tuple[float, float]:
    """Return the CPU time of a step and its median elapsed time, in ms, without the first steps."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": root}
    elapsed, marks = [], []
    command = [sys.executable, "-P", *program]
    with subprocess.Popen(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _ELAPSED.search(line):
                elapsed.append(float(found[1]))
                if len(elapsed) in (LEFT_OUT, STEPS):
                    marks.append(_cpu_ms(process.pid))
    assert process.returncode == 0
    assert len(elapsed) == STEPS
    return (marks[1] - marks[0]) / (STEPS - LEFT_OUT), statistics.median(elapsed[LEFT_OUT:])


def _cpu_ms(pid: int) -> float:
    """Return the CPU time of a process in user and kernel mode, all its threads."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) * _TICK_MS


if __name__ == "__main__":
    main()
