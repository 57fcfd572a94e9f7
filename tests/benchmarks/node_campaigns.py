"""Simulated campaigns, and looks at results: are the slow nodes named, and no others, and what does it cost?

    python tests/benchmarks/node_campaigns.py [--campaigns 200] [--rounds 4] [--noise normal heavy-tailed skewed]

1 % noise between runs, 0.3 % between rounds; slow nodes are 5 % slower; a node has at most as many runs as there are
rounds. The rounds, the looks and the verdicts are the product's own. A look is at runs of one point, as many on each of
64 nodes.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial

from cloudai_mbridge.gate.nodes.campaign import judge_rounds, plan_rounds, wanted_groups
from cloudai_mbridge.gate.nodes.verdicts import NodeRun, judge_nodes

Noise = Callable[[random.Random], float]
RATE, SLOWDOWN, EFFECT, NOISE, BETWEEN_ROUNDS = 0.01, 0.03, 0.05, 0.01, 0.003
NOISES: dict[str, Noise] = {
    "normal": lambda rng: rng.gauss(0, 1),
    "heavy-tailed": lambda rng: rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3) / math.sqrt(3),  # t, 3 df
    "skewed": lambda rng: rng.expovariate(1) - 1,
}
LOOKS = ((64, 0, 1), (64, 0, 2), (64, 0, 4), (64, 2, 2), (64, 2, 4), (6, 0, 2), (6, 1, 3))  # nodes, slow, runs of each
# nodes, slow, nodes of a run
CASES = ((64, 2, 1), (64, 2, 2), (64, 2, 4), (64, 2, 8), (64, 0, 1), (1024, 8, 1), (1024, 8, 4))


def play(
    num_nodes: int, num_slow: int, per_run: int, noise: Noise, rng: random.Random, rounds: int
) -> tuple[bool, bool, int]:
    """Return whether all slow nodes were named, whether another was, and the number of runs."""
    names = [f"n{i:04}" for i in range(num_nodes)]
    slow = set(rng.sample(names, num_slow))
    runs: list[NodeRun] = []
    known, done = None, 0
    for number, groups in enumerate(plan_rounds(names, per_run, rounds, rng)):
        if number:
            known = judge_rounds(runs, number, rounds, RATE, SLOWDOWN)
        level = rng.gauss(0, BETWEEN_ROUNDS)
        wanted = wanted_groups(groups, known, number, len(runs))
        if not wanted:
            break
        runs += [
            NodeRun(f"{number}", group, _time(level, noise, bool(slow & set(group)), rng), round=number)
            for group in wanted
        ]
        done = number + 1
    named = {node.node for node in judge_rounds(runs, done, rounds, RATE, SLOWDOWN).slow}
    return slow <= named, bool(named - slow), len(runs)


def _time(level: float, noise: Noise, is_slow: bool, rng: random.Random) -> float:
    return math.exp(level + NOISE * noise(rng)) * (1 + EFFECT * is_slow)


def look(num_nodes: int, num_slow: int, per_node: int, noise: Noise, rng: random.Random) -> tuple[bool, bool, int]:
    """The same of a look at results."""
    names = [f"n{i:04}" for i in range(num_nodes)]
    slow = set(rng.sample(names, num_slow))
    runs = [NodeRun("point", (name,), _time(0.0, noise, name in slow, rng)) for name in names for _ in range(per_node)]
    named = {node.node for node in judge_nodes(runs, false_alarm_rate=RATE, slowdown=SLOWDOWN).slow}
    return slow <= named, bool(named - slow), len(runs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--campaigns", type=int, default=200, help="of 64 nodes; a twentieth of 1,024")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4, help="of a campaign: runs a node")
    parser.add_argument("--noise", nargs="+", default=list(NOISES), choices=NOISES)
    args = parser.parse_args()
    print(f"{'':14}{'nodes':>6}{'slow':>6}{'':>11}{'times':>6}{'all named':>11}{'another':>9}{'runs':>8}{'CPU s':>8}")
    for name in args.noise:
        for what, cases, of_case in (
            ("nodes a run", CASES, partial(play, rounds=args.rounds)),
            ("runs a node", LOOKS, look),
        ):
            for num_nodes, num_slow, number in cases:
                times = args.campaigns if num_nodes <= 64 else max(1, args.campaigns // 20)
                rng, started = random.Random(args.seed), time.process_time()
                found = [of_case(num_nodes, num_slow, number, NOISES[name], rng) for _ in range(times)]
                spent = (time.process_time() - started) / times
                named, another = (100 * sum(each[i] for each in found) / times for i in (0, 1))
                runs = sum(each[2] for each in found) / times
                line = f"{name:14}{num_nodes:6}{num_slow:6}{number:3} {what:11}{times:6}"
                print(f"{line}{named:7.1f}%{another:8.1f}%{runs:8.0f}{spent:8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
