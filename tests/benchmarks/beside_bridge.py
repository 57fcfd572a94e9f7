"""The step time of our loop and of the one of Megatron-Bridge, by turns: python tests/benchmarks/beside_bridge.py

By hand, with the Python of `make bridge-loop`. Both loops train one model with the same layers on the same samples, one
rank and one thread, and log every step; Megatron-Bridge's default is every hundredth. Runs alternate, since the machine
drifts more than the loops differ: compare pairs. On a GPU Python's part of a step is another one.

Printed for each pair: medians of the steps' times in ms as both loops log them, without the first ones, and the ratio.
"""

import argparse
import re
import statistics
import tempfile
from pathlib import Path

from tests.interop.bridge_loop.conftest import Beside, why_skipped

STEPS, LEFT_OUT = 150, 20
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4)
    pairs = parser.parse_args().pairs
    if missing := why_skipped():
        raise SystemExit(f"Megatron-Bridge's loop cannot run: {missing}")
    ratios = []
    with tempfile.TemporaryDirectory(prefix="mbridge-beside-") as directory:
        case = {"train": {"train_iters": STEPS, "global_batch_size": 1}, "layers": "ours"}
        both = Beside(Path(directory), case)
        for number in range(1, pairs + 1):
            both.theirs()
            both.ours("theirs.yaml")
            theirs, ours = (_median(log) for log in both.logs[-2:])
            ratios.append(ours / theirs)
            print(f"{number}: Megatron-Bridge {theirs:.2f} ms, ours {ours:.2f} ms, ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"ratio ours / Megatron-Bridge: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
    )


def _median(log: Path) -> float:
    times = [float(text) for text in _ELAPSED.findall(log.read_text())]
    assert len(times) == STEPS
    return statistics.median(times[LEFT_OUT:])


if __name__ == "__main__":
    main()
