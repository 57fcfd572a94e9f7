"""A gate that looks every night, for sixty nights: how often it is ever wrong, and how soon it finds a drift.

    python tests/benchmarks/sixty_nights.py [--series 300] [--points 10] [--runs 1] [--night-noise 0 0.002] [--seed 1]

Every night has runs of every point, with 1 % of noise between runs and a level that all runs of a night share. It is
judged by the product's own code as `gate --policy` does with a history: against the last ten runs of each point, with
the rate kept over sixty nights. `ever red`: series in which any night was a regression, of any kind. `in 4 weeks`: the
share that had one by the 28th night, where all points become 0.3 % slower a week from the first night on.
"""

import argparse
import math
import sys
import time
from datetime import UTC, date, datetime, timedelta

import numpy as np
from simulated_runs import noisy_steps, simulated_run

from cloudai_mbridge.gate.compare.judge import judge_results
from cloudai_mbridge.gate.compare.nightly import Nightly
from cloudai_mbridge.gate.compare.policy import GatePolicy
from cloudai_mbridge.gate.compare.reference import reference_from_runs
from cloudai_mbridge.gate.compare.verdict import GateVerdict
from cloudai_mbridge.gate.results.read import RunResult
from cloudai_mbridge.gate.results.values import METRICS, PRIMARY
from cloudai_mbridge.gate.statistics.nights import night_levels

NIGHTS, LAST, NOISE, PER_WEEK, FOUR_WEEKS = 60, 10, 0.01, 0.003, 28
START = datetime(2026, 1, 1, 2, tzinfo=UTC)
TODAY = date(2026, 1, 1)


def night_of(number: int, points: int, runs: int, level: float, rng: np.random.Generator) -> dict[int, list[RunResult]]:
    """Return the runs of a night, by point."""
    ended = (START + timedelta(days=number)).isoformat()
    return {
        point: [
            simulated_run(
                f"{number}-{point}-{i}",
                noisy_steps((1 + point / 10) * math.exp(level + NOISE * rng.standard_normal()), rng),
                point=f"nightly/p{point}",
                comparability_id=f"p{point}",
                comparability={"args.tp": 1 << point % 4, "args.pp": 1 + point % 3},
                ended_at=ended,
            )
            for i in range(runs)
        ]
        for point in range(points)
    }


def first_red(points: int, runs: int, night_noise: float, per_week: float, rng: np.random.Generator) -> tuple[int, str]:
    """Return the number of the first night that is red, from 1 on, and what was; 0 and "" if none is."""
    policy = GatePolicy.model_validate({"name": "n", "history": {"file": "h", "last": LAST, "nights": NIGHTS}})
    known: dict[int, list[RunResult]] = {point: [] for point in range(points)}
    logs: dict[str, list[tuple[str, float]]] = {f"p{point}": [] for point in range(points)}
    for number in range(NIGHTS):
        level = night_noise * rng.standard_normal() + per_week / 7 * number
        night = night_of(number, points, runs, level, rng)
        for point, results in night.items():
            values = [(run.ended_at, METRICS[PRIMARY].of(run)) for run in results]
            logs[f"p{point}"] += [(ended, math.log(value[0])) for ended, value in values if value]
        references = [reference_from_runs(of[-LAST:]) for of in known.values() if of]
        if references:
            results = [run for of in night.values() for run in of]
            nightly = Nightly(NIGHTS, night_levels(logs))
            judged = judge_results(policy, references, results, where="h", today=TODAY, nightly=nightly)
            if judged.verdict is GateVerdict.REGRESSION:
                red = [each.point for each in (*judged.shared, *judged.points) if each.verdict is judged.verdict]
                what = "drift" if any("nights" in name for name in red) else "all" if "all " in red[0] else "other"
                return number + 1, what
        for point, results in night.items():
            known[point] += results
    return 0, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=300)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--night-noise", type=float, nargs="+", default=[0.0, 0.002])
    parser.add_argument("--per-week", type=float, nargs="+", default=[0.0, PER_WEEK])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{args.series} series of {NIGHTS} nights, {args.points} points with {args.runs} run(s) a night each")
    for noise in args.night_noise:
        for per_week in args.per_week:
            started = time.process_time()
            rng = np.random.default_rng([args.seed, round(1e6 * noise), round(1e6 * per_week)])
            found = [first_red(args.points, args.runs, noise, per_week, rng) for _ in range(args.series)]
            nights = np.array([night for night, _ in found])
            kinds = {kind: sum(what == kind for _, what in found) for kind in ("drift", "all", "other")}
            soon = ((nights > 0) & (nights <= FOUR_WEEKS)).mean()
            spent = time.process_time() - started
            line = f"nights of {noise:.1%}, {per_week:+.1%} a week: ever red {(nights > 0).mean():.2%}"
            line += f", in 4 weeks {soon:.1%}; by {kinds}; {spent / args.series:.1f} s of CPU a series"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
