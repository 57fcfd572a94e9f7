"""Operating curves of a gate of many points: how often it is wrong, and what it finds.

    python tests/benchmarks/suite_curves.py [--gates 400] [--points 40] [--runs 5] [--only NAME] [--seed 1]

Every number comes from the product's own `judge_results` under the default policy. A run's value has a standard
deviation of 1 % between runs, of which the steps make little. `any` is a gate with any regression; `point` is one with
a regression of the point that was slowed, `all` one that says so of all points together.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
from simulated_runs import noisy_steps, simulated_run

from cloudai_mbridge.gate.judge import judge_results
from cloudai_mbridge.gate.policy import GatePolicy
from cloudai_mbridge.gate.runs import RunResult, reference_from_runs
from cloudai_mbridge.gate.verdict import GateVerdict

Rng = np.random.Generator


def normal(rng: Rng, size: int) -> np.ndarray:
    return rng.standard_normal(size)


def heavy_tailed(rng: Rng, size: int) -> np.ndarray:
    return np.asarray(rng.standard_t(3, size) / math.sqrt(3))


def skewed(rng: Rng, size: int) -> np.ndarray:
    return np.asarray(rng.exponential(size=size) - 1)


@dataclass(frozen=True)
class Case:
    """noise: between runs, drawn with standard deviation 1. spread: of the noisiest point's noise to the quietest's.

    slow: change of the first point; common: of all. nights: relative standard deviation; the reference has five, and
    the result one. nodes, slow_nodes: their numbers; a slow one makes its runs 5 % slower. sides: runs of reference and
    result.
    """

    name: str
    noise: Callable[[Rng, int], np.ndarray] = normal
    spread: float = 1.0
    slow: float = 0.0
    common: float = 0.0
    nights: float | None = None
    nodes: int = 0
    slow_nodes: int = 0
    sides: tuple[int, int] | None = None


NOISES = (
    Case("log-normal"),
    Case("heavy-tailed (t, 3 df)", heavy_tailed),
    Case("skewed (exponential)", skewed),
    Case("noise spread by 3", spread=3.0),
    Case("10 runs against 3", sides=(10, 3)),
    Case("10 against 3, skewed", skewed, sides=(10, 3)),
    Case("10 against 3, heavy-tailed", heavy_tailed, sides=(10, 3)),
    Case("nights of 0.5 %", nights=0.005),
    Case("nights of 0.2 %", nights=0.002),
    Case("4 of 40 nodes 5 % slower", nodes=40, slow_nodes=4),
)
CHANGES = (("no change", {}), ("one 3 % slower", {"slow": 0.03}), ("one 5 % slower", {"slow": 0.05}))
COMMON = ("all 1 % slower", {"common": 0.01})


def simulate(case: Case, rng: Rng, points: int, runs: int) -> tuple[list[Any], list[RunResult]]:
    names = [f"node{i:03}" for i in range(case.nodes)]
    bad = set(rng.choice(names, case.slow_nodes, replace=False)) if case.slow_nodes else set()
    sizes = case.sides or (runs, runs)
    levels = (case.nights or 0.0) * rng.standard_normal((2, max(sizes)))
    references, results = [], []
    for point in range(points):
        sd = 0.01 * case.spread ** rng.uniform(-0.5, 0.5)
        for side, size in enumerate(sizes):
            values = sd * case.noise(rng, size)
            change = math.log1p(case.common) + (math.log1p(case.slow) if point == 0 else 0.0) if side else 0.0
            found = []
            for number in range(size):
                night = 0 if side else number % 5
                node = str(rng.choice(names)) if names else ""
                level = values[number] + change + levels[side, night] + (math.log(1.05) if node in bad else 0.0)
                ended = "" if case.nights is None else f"2026-03-{20 if side else 10 + night}T02:00:00+00:00"
                found.append(_run(f"{point}-{side}-{number}", point, math.exp(level), rng, node, ended))
            if side:
                results += found
            else:
                references.append(reference_from_runs(found))
    return references, results


def _run(name: str, point: int, level: float, rng: Rng, node: str, ended_at: str) -> RunResult:
    return simulated_run(
        name,
        noisy_steps((1 + point / 10) * level, rng),
        point=f"suite/p{point}",
        comparability_id=f"p{point}",
        comparability={"args.tp": 1 << point % 4, "args.pp": 1 + point % 3},
        nodes=(node,) if node else (),
        ended_at=ended_at,
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gates", type=int, default=400)
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--change", default="")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    policy = GatePolicy.model_validate({"name": "default", "baseline": "simulated"})
    print(f"{args.gates} gates a line, {args.points} points, {args.runs} runs a side; shares of gates in %, s a gate")
    for case, (title, change) in itertools.product(NOISES, (*CHANGES, COMMON)):
        if args.only not in case.name or args.change not in title:
            continue
        rng = np.random.default_rng([args.seed, *map(ord, case.name + title)])
        counts, spent = dict.fromkeys(("any", "point", "all"), 0), 0.0
        for _ in range(args.gates):
            references, results = simulate(Case(**{**case.__dict__, **change}), rng, args.points, args.runs)
            started = time.process_time()
            judged = judge_results(policy, references, results, where="simulated", today=date(2026, 1, 1))
            spent += time.process_time() - started
            red = GateVerdict.REGRESSION
            counts["any"] += judged.verdict is red
            counts["point"] += any(point.point == "suite/p0" and point.verdict is red for point in judged.points)
            counts["all"] += any(each.verdict is red and each.point.startswith("all ") for each in judged.shared)
        shares = "  ".join(f"{name} {100 * count / args.gates:6.2f}" for name, count in counts.items())
        print(f"{case.name:28}{title:18}{shares}  {spent / args.gates:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
