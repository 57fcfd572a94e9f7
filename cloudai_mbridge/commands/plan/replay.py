"""`mbridge tune --replay`: the search, and what it is compared with, on what was measured."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.json_output import print_json
from cloudai_mbridge.errors import OK, counted
from cloudai_mbridge.estimate.cluster import calibration_note
from cloudai_mbridge.models.system import System
from cloudai_mbridge.tune.replay.case import Case, read_cases
from cloudai_mbridge.tune.replay.play import TOLERANCES, Score, play, random_order, trials_to, without_prior

_SMALL = 10  # spaces below so many points are not in the summary: any order is soon through
_RANDOM_ORDERS, _SAMPLED_ORDERS = 50, 3

Order = Callable[[Case, int], Sequence[int]]


@dataclass(frozen=True)
class Space:
    """How a search went in the points of one space.

    best_s: of a step; None where no layout fits. trials_to: share of it -> trials until one was within that.
    stops_after: trials. picked_s: the fastest step by then.
    """

    name: str
    points: int
    best_s: float | None
    trials_to: Mapping[str, int | None]
    stops_after: int
    picked_s: float | None


@dataclass(frozen=True)
class Replay:
    """A search by measurement, played against what was measured."""

    version: Literal[1]
    spaces: tuple[Space, ...]


def replay(path: Path, system: System | None, *, as_json: bool) -> int:
    """Play the search against what was measured, with a system's calibration, and print how many trials it took."""
    scores = [play(case) for case in read_cases(path, system)]
    if as_json:
        print_json(Replay(version=1, spaces=tuple(map(_as_space, scores))))
        return OK
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
    return OK


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
        from cloudai_mbridge.tune.replay.optuna_samplers import gaussian_process, tpe

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


def _as_space(score: Score) -> Space:
    case = score.case
    return Space(
        name=case.name,
        points=len(case.times),
        best_s=case.best_s,
        trials_to={str(tolerance): score.trials_to(tolerance) for tolerance in TOLERANCES},
        stops_after=score.num_trials,
        picked_s=score.picked_s,
    )
