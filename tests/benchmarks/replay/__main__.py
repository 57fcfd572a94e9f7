"""Play the search of `mbridge tune`, and others, against measured layouts, and print how many trials each takes.

    python -m tests.benchmarks.replay FILE [--system-config SYSTEM.toml]

FILE: a CSV table as for `mbridge calibrate`, or the results of a run, of which each test is a space.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.estimate.hardware import calibration_note
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.system import System
from tests.benchmarks.replay.case import Case, read_cases
from tests.benchmarks.replay.play import TOLERANCES, Score, play, random_order, trials_to, without_prior

_SMALL = 10  # spaces below so many points are not in the summary: any order is soon through
_RANDOM_ORDERS, _SAMPLED_ORDERS = 50, 3

Order = Callable[[Case, int], Sequence[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--system-config", type=Path)
    args = parser.parse_args()
    try:
        replay(args.file, load_system(args.system_config) if args.system_config else None)
    except BadInput as error:
        sys.exit(f"error: {error}")


def replay(path: Path, system: System | None) -> None:
    """Play the search against what was measured, with a system's calibration."""
    scores = [play(case) for case in read_cases(path, system)]
    console = new_console()
    if note := calibration_note(system):
        console.print_line(note)
    names = ("space", "points", "best, s", *(f"to {tolerance:.0%}" for tolerance in TOLERANCES), "stops after", "picks")
    table = Table(*(Column(name, justify="left" if name == "space" else "right") for name in names))
    for score in scores:
        table.add_row(*map(Text, _cells(score)))
    console.print(table)
    large = [score for score in scores if len(score.case.times) >= _SMALL and score.case.best_s is not None]
    if large:
        console.print_line(
            f"trials, median and 95 % quantile, over {counted(len(large), 'space')} of {_SMALL} points or more:"
        )
        for line in _summary(large):
            console.print_line(line)
    if not _has_optuna():
        console.print_line("without Optuna's samplers, which are not installed: pip install optuna")


def _cells(score: Score) -> list[str]:
    case = score.case
    if case.best_s is None:
        return [case.name, str(len(case.times)), "-", *["-"] * len(TOLERANCES), str(score.num_trials), "-"]
    trials = [str(score.trials_to(tolerance)) for tolerance in TOLERANCES]
    picks = "-" if score.picked_s is None else f"{score.picked_s / case.best_s - 1:+.1%}"
    return [case.name, str(len(case.times)), f"{case.best_s:.4g}", *trials, str(score.num_trials), picks]


def _summary(scores: Sequence[Score]) -> Iterator[str]:
    yield _line("this search", [[(score.case, score.order) for score in scores]])
    for name, order, repeats in _baselines():
        yield _line(name, [[(score.case, order(score.case, seed)) for score in scores] for seed in range(repeats)])


def _baselines() -> Iterator[tuple[str, Order, int]]:
    yield "without a prior", without_prior, 1
    yield "random order", random_order, _RANDOM_ORDERS
    if _has_optuna():
        from tests.benchmarks.replay.optuna_samplers import gaussian_process, tpe

        yield "Optuna's TPE", tpe, _SAMPLED_ORDERS
        yield "Optuna's Gaussian process", gaussian_process, 1


def _line(name: str, orders: Sequence[Sequence[tuple[Case, Sequence[int]]]]) -> str:
    found = []
    for tolerance in TOLERANCES:
        trials = [trials_to(case, order, tolerance) or len(order) for each in orders for case, order in each]
        found.append(f"to {tolerance:.0%} {median(trials):g} and {np.quantile(trials, 0.95):.3g}")
    return f"  {name}: {', '.join(found)}"


def _has_optuna() -> bool:
    return importlib.util.find_spec("optuna") is not None


if __name__ == "__main__":
    main()
