"""Simulated campaigns: are the slow nodes named, and no others, and what does it cost?

    python tests/benchmarks/node_campaigns.py [--campaigns 200] [--seed 1]

1 % noise between runs, 0.3 % between rounds; slow nodes are 5 % slower; at most four runs a node. The rounds, the looks
and the verdicts are the product's own.
"""

import argparse
import math
import random
import sys
import time

from cloudai_mbridge.gate.nodes.campaign import plan_rounds, undecided_after, wanted_groups
from cloudai_mbridge.gate.nodes.verdicts import NodeRun, judge_nodes

ROUNDS, RATE, SLOWDOWN, EFFECT, NOISE, BETWEEN_ROUNDS = 4, 0.01, 0.03, 0.05, 0.01, 0.003
CASES = ((64, 2, 1), (64, 2, 2), (64, 2, 8), (64, 0, 1), (1024, 8, 1), (1024, 8, 4))  # nodes, slow, nodes of a run


def play(num_nodes: int, num_slow: int, per_run: int, rng: random.Random) -> tuple[bool, bool, int]:
    """Return whether all slow nodes were named, whether another was, and the number of runs."""
    names = [f"n{i:04}" for i in range(num_nodes)]
    slow, undecided = set(rng.sample(names, num_slow)), set(names)
    done: list[list[NodeRun]] = []
    for number, groups in enumerate(plan_rounds(names, per_run, ROUNDS, rng)):
        if number:
            undecided = undecided_after(done, names, ROUNDS, RATE, SLOWDOWN)
        level = rng.gauss(0, BETWEEN_ROUNDS)
        wanted = wanted_groups(groups, undecided)
        if not wanted:
            break
        done.append(
            [
                NodeRun(f"{number}", group, math.exp(rng.gauss(level, NOISE)) * (1 + EFFECT * bool(slow & set(group))))
                for group in wanted
            ]
        )
    runs = [run for each in done for run in each]
    named = {node.node for node in judge_nodes(runs, false_alarm_rate=RATE / ROUNDS, slowdown=SLOWDOWN).slow}
    return slow <= named, bool(named - slow), len(runs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--campaigns", type=int, default=200, help="of 64 nodes; a twentieth of 1,024")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{'nodes':>6}{'slow':>6}{'a run':>6}{'campaigns':>11}{'all named':>11}{'another':>9}{'runs':>8}{'CPU s':>8}")
    for num_nodes, num_slow, per_run in CASES:
        campaigns = max(1, args.campaigns * 64 // num_nodes if num_nodes == 64 else args.campaigns // 20)
        rng, started = random.Random(args.seed), time.process_time()
        found = [play(num_nodes, num_slow, per_run, rng) for _ in range(campaigns)]
        spent = (time.process_time() - started) / campaigns
        shares = [100 * sum(each[i] for each in found) / campaigns for i in (0, 1)]
        runs = sum(each[2] for each in found) / campaigns
        print(
            f"{num_nodes:6}{num_slow:6}{per_run:6}{campaigns:11}{shares[0]:10.1f}%{shares[1]:8.1f}%{runs:8.0f}{spent:8.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
