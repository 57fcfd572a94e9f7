"""What ending trials early saves, and how often it ends the best point wrongly.

    python tests/benchmarks/early_ending.py TABLE.csv [--seeds 20] [--steps 50] [--warmup 3]

TABLE.csv has measured layouts, as for `mbridge calibrate`. Every space of at least ten points is searched one point
at a time, once with each trial run to its end and once with trials ended early. A trial's steps are drawn around its
measured time: 1 % (standard deviation) between runs, and between steps what the table below says. The first step takes
three times as long, and the runner looks after every step. Searches end by their own rule.

Printed: GPU time of all trials with early ending over that without it, and in how many searches the best point of the
space was tried and ended early.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cloudai_mbridge.tune.measured_search import NOISE, is_slower
from cloudai_mbridge.tune.search import CHANCE, Trial
from tests.benchmarks.replay.case import Case, read_cases
from tests.benchmarks.replay.play import search_in

STEP_NOISE = (0.01, 0.03, 0.1)
FIRST_STEP = 3.0
LEAST_POINTS = 10


def play(
    case: Case, draw: np.random.Generator, noise: float, steps: int, warmup: int, *, is_early: bool
) -> tuple[float, bool]:
    """Return the seconds of all steps of a search, and whether it has ended the best point early."""
    search, used, has_lost_best = search_in(case), 0.0, False
    while (index := search.next()) is not None:
        true_s = case.times[index]
        if true_s is None:
            search.learn(Trial(index, None))
            continue
        times = true_s * np.exp(draw.normal(0, NOISE) + draw.normal(0, noise, steps))
        times[0] *= FIRST_STEP
        best = search.best if is_early else None
        last = steps
        if best is not None and best.step_time_s is not None:
            looks = range(warmup + 1, steps)
            error = best.error or NOISE
            last = next(
                (n for n in looks if is_slower(times[warmup:n].tolist(), best.step_time_s, error, NOISE)), steps
            )
        used += float(times[:last].sum())
        measured = times[warmup:last]
        error = float(np.hypot(NOISE, 1.25 * noise / np.sqrt(len(measured))))
        search.learn(Trial(index, float(np.median(measured)), error, is_cut=last < steps))
        has_lost_best |= last < steps and true_s == case.best_s
        if search.chance_of_better() < CHANCE:
            break
    return used, has_lost_best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args(arguments)
    cases = [case for case in read_cases(options.table, None) if len(case.times) >= LEAST_POINTS]
    print(f"{len(cases)} spaces, {options.seeds} searches of each, {options.steps} steps, {options.warmup} of warm-up")
    for noise in STEP_NOISE:
        shares, lost = [], 0
        for case in cases:
            for seed in range(options.seeds):
                same = (noise, options.steps, options.warmup)
                full, _ = play(case, np.random.default_rng(seed), *same, is_early=False)
                short, has_lost = play(case, np.random.default_rng(seed), *same, is_early=True)
                shares.append(short / full)
                lost += has_lost
        saved = f"GPU time {np.mean(shares):.0%} of that without (median {np.median(shares):.0%})"
        wrong = f"the best point was ended in {lost} of {len(shares)} searches ({lost / len(shares):.1%})"
        print(f"steps within {noise:.0%}: {saved}; {wrong}", flush=True)


if __name__ == "__main__":
    main()
