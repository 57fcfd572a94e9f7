"""Operating curves of the gate, on simulated clusters: how often it cries wolf, how often it sees a planted slowdown.

    python tests/benchmarks/gate_curves.py [--gates 2000] [--runs 5] [--noise 0.01] [--only NAME] [--seed 1]

Every number comes from the product's own `judge_results` under the default policy, on runs with 50 steps of which the
first 3 are warm-up. A cluster is what a run's steps look like, times what runs differ by. `red` is a regression,
`green` a pass or an improvement; the rest is inconclusive.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
from simulated_runs import simulated_run

from cloudai_mbridge.gate.judge import judge_results
from cloudai_mbridge.gate.policy import GatePolicy
from cloudai_mbridge.gate.runs import RunResult, reference_from_runs
from cloudai_mbridge.gate.verdict import GREEN, GateVerdict

STEPS, WARMUP = 50, 3
SLOWDOWNS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.10)
Rng = np.random.Generator


@dataclass(frozen=True)
class Cluster:
    """steps: draws the steps of a run around 1. runs: draws what a run differs by, of standard deviation 1.

    slow_nodes: share of runs that are 5 % slower. nights: relative standard deviation of what all runs of a side share.
    """

    name: str
    steps: Callable[[Rng], np.ndarray]
    runs: Callable[[Rng], float] = lambda rng: rng.standard_normal()
    slow_nodes: float = 0.0
    nights: float = 0.0


def log_normal(rng: Rng, sd: float = 0.02) -> np.ndarray:
    return np.exp(sd * rng.standard_normal(STEPS))


def heavy_tailed(rng: Rng) -> np.ndarray:
    return 1 + 0.02 * np.abs(rng.standard_t(2, STEPS))


def autocorrelated(rng: Rng) -> np.ndarray:
    """An AR(1) process with coefficient 0.8: a step is like the one before."""
    out, last = np.empty(STEPS), rng.standard_normal()
    for i in range(STEPS):
        last = 0.8 * last + 0.6 * rng.standard_normal()
        out[i] = last
    return np.exp(0.01 * out)


def drifting(rng: Rng) -> np.ndarray:
    """Steps that become 5 % slower during the run, as a chip that heats up."""
    return log_normal(rng, 0.01) * (1 + 0.05 * np.arange(STEPS) / STEPS)


def warming_up(rng: Rng) -> np.ndarray:
    """Twenty slow first steps, of which the window leaves out three only."""
    return log_normal(rng, 0.01) * (1 + 2.0 * np.exp(-np.arange(STEPS) / 4))


def two_modes(rng: Rng) -> np.ndarray:
    return log_normal(rng, 0.005) * np.where(rng.random(STEPS) < 0.3, 1.1, 1.0)


def hiccups(rng: Rng) -> np.ndarray:
    return log_normal(rng, 0.01) * np.where(rng.random(STEPS) < 0.02, 5.0, 1.0)


CLUSTERS = (
    Cluster("log-normal", log_normal),
    Cluster("heavy-tailed steps", heavy_tailed),
    Cluster("autocorrelated steps", autocorrelated),
    Cluster("drift within runs", drifting),
    Cluster("long warm-up", warming_up),
    Cluster("two modes, 30 % at +10 %", two_modes),
    Cluster("hiccups, 2 % at x5", hiccups),
    Cluster("heavy-tailed runs (t, 3 df)", log_normal, lambda rng: rng.standard_t(3) / math.sqrt(3)),
    Cluster("skewed runs (exponential)", log_normal, lambda rng: rng.exponential() - 1),
    Cluster("slow nodes, 10 % at +5 %", log_normal, slow_nodes=0.1),
    Cluster("sides of one night each, 0.5 %", log_normal, nights=0.005),
)


def simulate(cluster: Cluster, rng: Rng, noise: float, slowdown: float, runs: int, side: str) -> list[RunResult]:
    """Return runs of one point; each has its own level, and steps around it."""
    night = math.exp(cluster.nights * rng.standard_normal()) if cluster.nights else 1.0
    return [_run(cluster, rng, noise, night * (1 + slowdown) - 1, f"{side}{i}") for i in range(runs)]


def _run(cluster: Cluster, rng: Rng, noise: float, slowdown: float, name: str) -> RunResult:
    level = math.exp(noise * cluster.runs(rng)) * (1 + slowdown)
    level *= 1.05 if rng.random() < cluster.slow_nodes else 1.0
    times = level * cluster.steps(rng)
    return simulated_run(name, times, warmup=WARMUP)


def curve(cluster: Cluster, noise: float, slowdown: float, runs: int, gates: int, seed: int) -> Counter[GateVerdict]:
    """Judge many gates and count the verdicts."""
    rng = np.random.default_rng([seed, round(1e6 * noise), round(1e6 * slowdown), runs])
    policy, counts = GatePolicy.model_validate({"name": "default", "baseline": "simulated"}), Counter[GateVerdict]()
    for _ in range(gates):
        reference = reference_from_runs(simulate(cluster, rng, noise, 0.0, runs, "a"))
        results = simulate(cluster, rng, noise, slowdown, runs, "b")
        judged: Any = judge_results(policy, [reference], results, where="simulated", today=date(2026, 1, 1))
        counts[judged.verdict] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gates", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.01])
    parser.add_argument("--slowdown", type=float, nargs="+", default=list(SLOWDOWNS))
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{args.gates} gates a cell, {args.runs} runs a side; per cell: red % / green %")
    for noise in args.noise:
        print(f"\nrun-to-run noise {noise:.1%}")
        print(f"{'slowdown':30}" + "".join(f"{s:>15.0%}" for s in args.slowdown))
        for cluster in CLUSTERS:
            if args.only not in cluster.name:
                continue
            cells = []
            for slowdown in args.slowdown:
                counts = curve(cluster, noise, slowdown, args.runs, args.gates, args.seed)
                red, green = counts[GateVerdict.REGRESSION], sum(counts[v] for v in GREEN)
                cells.append(f"{100 * red / args.gates:6.2f} /{100 * green / args.gates:6.1f}")
            print(f"{cluster.name:30}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
