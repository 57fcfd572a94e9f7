"""Optuna's samplers as baselines: they see the sizes of a layout and its step time, and know nothing of either."""

import warnings
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.replay.case import Case
from tests.benchmarks.replay.play import TOLERANCES, random_order, trials_to

_ASKED_PER_ROW = 20
_TOO_SLOW = 10.0  # times the slowest row: what a layout that runs out of memory is told to take


def tpe(case: Case, seed: int) -> Sequence[int]:
    """Return the order of the tree-structured Parzen estimator."""
    import optuna

    return _order(case, seed, optuna.samplers.TPESampler(seed=seed))


def gaussian_process(case: Case, seed: int) -> Sequence[int]:
    """Return the order of Optuna's Gaussian process."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _order(case, seed, optuna.samplers.GPSampler(seed=seed))


def _order(case: Case, seed: int, sampler: Any) -> list[int]:
    """Ask and tell until one is as good as any tolerance asks for; the other points follow at random.

    What is not a point of the space, or was tried before, costs nothing.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = list(dict.fromkeys(name for point in case.coordinates for name in point))
    sizes = [tuple(point.get(name) for name in names) for point in case.coordinates]
    index_of = {size: index for index, size in enumerate(sizes)}
    values = {name: list(dict.fromkeys(size[i] for size in sizes)) for i, name in enumerate(names)}
    slowest = max((seconds for seconds in case.times if seconds is not None), default=1.0)
    study = optuna.create_study(sampler=sampler)
    order: list[int] = []
    for _ in range(_ASKED_PER_ROW * len(sizes)):
        if len(order) == len(sizes) or trials_to(case, order, min(TOLERANCES)) is not None:
            break
        trial = study.ask()
        asked = tuple(trial.suggest_categorical(name, known) for name, known in values.items() if len(known) > 1)
        chosen = iter(asked)
        size = tuple(next(chosen) if len(values[name]) > 1 else values[name][0] for name in names)
        if (index := index_of.get(size)) is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        if index not in order:
            order.append(index)
        study.tell(trial, case.times[index] or _TOO_SLOW * slowest)
    return [*order, *(index for index in random_order(case, seed) if index not in set(order))]
