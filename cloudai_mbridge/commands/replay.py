"""`mbridge tune --replay`: the search, and what it is compared with, on a table of measured layouts."""

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.commands.live_view import new_console
from cloudai_mbridge.errors import OK, counted
from cloudai_mbridge.estimate.cluster import calibration_note
from cloudai_mbridge.estimate.request import gpu_on
from cloudai_mbridge.models.system import System
from cloudai_mbridge.tune.replay.play import TOLERANCES, Score, play, random_order, trials_to, without_prior
from cloudai_mbridge.tune.replay.table import Space, read_table

_SMALL = 10  # spaces below so many points are not in the summary: any order is soon through
_RANDOM_ORDERS, _SAMPLED_ORDERS = 50, 3

Order = Callable[[Space, int], Sequence[int]]


def replay(path: Path, system: System | None, *, is_json: bool) -> int:
    """Play the search against a table, with a system's calibration, and print how many trials it took."""
    spaces = [replace(space, gpu=gpu_on(space.gpu, system)) for space in read_table(path)]
    scores = [play(space) for space in spaces]
    if is_json:
        click.echo(json.dumps({"version": 1, "spaces": [_as_data(score) for score in scores]}, indent=1))
        return OK
    console = new_console()
    if note := calibration_note(system):
        console.print_line(note)
    names = ("space", "points", "best, s", *(f"to {tolerance:.0%}" for tolerance in TOLERANCES), "stops after", "picks")
    table = Table(*(Column(name, justify="left" if name == "space" else "right") for name in names))
    for score in scores:
        table.add_row(*map(Text, _cells(score)))
    console.print(table)
    large = [score for score in scores if len(score.space.rows) >= _SMALL and score.space.best_s is not None]
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
    space = score.space
    if space.best_s is None:
        return [space.name, str(len(space.rows)), "-", *["-"] * len(TOLERANCES), str(score.num_trials), "-"]
    trials = [str(score.trials_to(tolerance)) for tolerance in TOLERANCES]
    picks = "-" if score.picked_s is None else f"{score.picked_s / space.best_s - 1:+.1%}"
    return [space.name, str(len(space.rows)), f"{space.best_s:.4g}", *trials, str(score.num_trials), picks]


def _summary(scores: Sequence[Score]) -> Iterator[str]:
    yield _line("this search", [[(score.space, score.order) for score in scores]])
    for name, order, repeats in _baselines():
        yield _line(name, [[(score.space, order(score.space, seed)) for score in scores] for seed in range(repeats)])


def _baselines() -> Iterator[tuple[str, Order, int]]:
    yield "without a prior", without_prior, 1
    yield "random order", random_order, _RANDOM_ORDERS
    if _has_optuna():
        from cloudai_mbridge.tune.replay.optuna_samplers import gaussian_process, tpe

        yield "Optuna's TPE", tpe, _SAMPLED_ORDERS
        yield "Optuna's Gaussian process", gaussian_process, 1


def _line(name: str, orders: Sequence[Sequence[tuple[Space, Sequence[int]]]]) -> str:
    found = []
    for tolerance in TOLERANCES:
        trials = [trials_to(space, order, tolerance) or len(order) for each in orders for space, order in each]
        found.append(f"to {tolerance:.0%} {median(trials):g} and {np.quantile(trials, 0.95):.3g}")
    return f"  {name}: {', '.join(found)}"


def _has_optuna() -> bool:
    return importlib.util.find_spec("optuna") is not None


def _as_data(score: Score) -> dict[str, Any]:
    space = score.space
    return {
        "name": space.name,
        "points": len(space.rows),
        "best_s": space.best_s,
        "trials_to": {str(tolerance): score.trials_to(tolerance) for tolerance in TOLERANCES},
        "stops_after": score.num_trials,
        "picked_s": score.picked_s,
    }
