"""Optuna's samplers as baselines: they see the sizes of a layout and its step time, and know nothing of either."""

import warnings
from collections.abc import Sequence
from typing import Any

from cloudai_mbridge.tune.replay.play import random_order
from cloudai_mbridge.tune.replay.table import Space

_SIZES = ("tp", "pp", "cp", "vp", "ep", "mbs")
_ASKED_PER_ROW = 20
_TOO_SLOW = 10.0  # times the slowest row: what a layout that runs out of memory is told to take


def tpe(space: Space, seed: int) -> Sequence[int]:
    """Return the order of the tree-structured Parzen estimator."""
    import optuna

    return _order(space, seed, optuna.samplers.TPESampler(seed=seed))


def gaussian_process(space: Space, seed: int) -> Sequence[int]:
    """Return the order of Optuna's Gaussian process."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _order(space, seed, optuna.samplers.GPSampler(seed=seed))


def _order(space: Space, seed: int, sampler: Any) -> list[int]:
    """Ask and tell until all rows were tried; what is no row of the table, or was tried before, costs nothing."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sizes = [tuple(getattr(row.layout, name) for name in _SIZES) for row in space.rows]
    index_of = {size: index for index, size in enumerate(sizes)}
    values = {name: sorted({size[i] for size in sizes}) for i, name in enumerate(_SIZES)}
    slowest = max((row.step_time_s for row in space.rows if row.step_time_s is not None), default=1.0)
    study = optuna.create_study(sampler=sampler)
    order: list[int] = []
    for _ in range(_ASKED_PER_ROW * len(sizes)):
        if len(order) == len(sizes):
            break
        trial = study.ask()
        asked = tuple(trial.suggest_categorical(name, known) for name, known in values.items() if len(known) > 1)
        chosen = iter(asked)
        size = tuple(next(chosen) if len(values[name]) > 1 else values[name][0] for name in _SIZES)
        if (index := index_of.get(size)) is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        if index not in order:
            order.append(index)
        study.tell(trial, space.rows[index].step_time_s or _TOO_SLOW * slowest)
    return [*order, *(index for index in random_order(space, seed) if index not in set(order))]
