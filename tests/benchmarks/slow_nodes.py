"""Simulated results: does `mbridge nodes show` name the slow nodes, and no others?

    python tests/benchmarks/slow_nodes.py [--times 200] [--noise normal heavy-tailed skewed]

Runs of one point, as many on each node; 1 % noise between runs; slow nodes are 5 % slower.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable

from cloudai_mbridge.gate.nodes import NodeRun, judge_nodes

Noise = Callable[[random.Random], float]
RATE, SLOWDOWN, EFFECT, NOISE = 0.01, 0.03, 0.05, 0.01
NOISES: dict[str, Noise] = {
    "normal": lambda rng: rng.gauss(0, 1),
    "heavy-tailed": lambda rng: rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3) / math.sqrt(3),  # t, 3 df
    "skewed": lambda rng: rng.expovariate(1) - 1,
}
LOOKS = ((64, 0, 1), (64, 0, 2), (64, 0, 4), (64, 2, 2), (64, 2, 4), (6, 0, 2), (6, 1, 3))  # nodes, slow, runs of each


def _time(noise: Noise, is_slow: bool, rng: random.Random) -> float:
    return math.exp(NOISE * noise(rng)) * (1 + EFFECT * is_slow)


def look(num_nodes: int, num_slow: int, per_node: int, noise: Noise, rng: random.Random) -> tuple[bool, bool, int]:
    """Return whether all slow nodes were named, whether another was, and the number of runs."""
    names = [f"n{i:04}" for i in range(num_nodes)]
    slow = set(rng.sample(names, num_slow))
    runs = [NodeRun("point", (name,), _time(noise, name in slow, rng)) for name in names for _ in range(per_node)]
    named = {node.node for node in judge_nodes(runs, false_alarm_rate=RATE, slowdown=SLOWDOWN).slow}
    return slow <= named, bool(named - slow), len(runs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=200, help="of each case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise", nargs="+", default=list(NOISES), choices=NOISES)
    args = parser.parse_args()
    print(f"{'':14}{'nodes':>6}{'slow':>6}{'runs a node':>12}{'all named':>11}{'another':>9}{'CPU s':>8}")
    for name in args.noise:
        for num_nodes, num_slow, number in LOOKS:
            rng, started = random.Random(args.seed), time.process_time()
            found = [look(num_nodes, num_slow, number, NOISES[name], rng) for _ in range(args.times)]
            spent = (time.process_time() - started) / args.times
            named, another = (100 * sum(each[i] for each in found) / args.times for i in (0, 1))
            line = f"{name:14}{num_nodes:6}{num_slow:6}{number:12}"
            print(f"{line}{named:10.1f}%{another:8.1f}%{spent:8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
