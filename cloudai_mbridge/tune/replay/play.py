"""A search, and what it is compared with, played against a space of measured layouts."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.memory import worst_stage
from cloudai_mbridge.estimate.memory.estimate import memory_per_stage
from cloudai_mbridge.estimate.memory.other import GIB
from cloudai_mbridge.estimate.point import assumptions_for
from cloudai_mbridge.estimate.time import time_model
from cloudai_mbridge.estimate.time.groups import StepGroups
from cloudai_mbridge.tune.belief import beliefs
from cloudai_mbridge.tune.factors import SDS, FactorModel
from cloudai_mbridge.tune.measured_search import FLAT, WIDE
from cloudai_mbridge.tune.replay.table import Space, positions
from cloudai_mbridge.tune.room import Room
from cloudai_mbridge.tune.search import CHANCE, Search, Trial

TOLERANCES = (0.05, 0.02)
# Of factors that were calibrated on other models of the same cluster, the standard deviation of the logarithms
_BETWEEN_MODELS = 0.2


@dataclass(frozen=True)
class Score:
    """How a search went. order: the rows as it tried them. picked: the best row when it would have stopped, if any."""

    space: Space
    order: tuple[int, ...]
    num_trials: int
    picked: int | None

    @property
    def picked_s(self) -> float | None:
        """The step time of what it picked."""
        return None if self.picked is None else self.space.rows[self.picked].step_time_s

    def trials_to(self, tolerance: float) -> int | None:
        """Return after how many trials one was within this share of the best; None where no layout fits."""
        return trials_to(self.space, self.order, tolerance)


def trials_to(space: Space, order: Sequence[int], tolerance: float) -> int | None:
    """Return after how many trials in this order one was within a share of the best."""
    if space.best_s is None:
        return None
    good = space.best_s * (1 + tolerance)
    times = (space.rows[index].step_time_s for index in order)
    return next((number for number, seconds in enumerate(times, 1) if seconds is not None and seconds <= good), None)


def search_in(space: Space, *, with_prior: bool = True) -> Search:
    """Return a search that has tried nothing. with_prior: with the models of time and memory, else with neither."""
    where = np.array(list(positions(space.rows)))
    if with_prior:
        is_calibrated = space.gpu.measured is not None
        prior_sd = np.full(len(SDS), _BETWEEN_MODELS) if is_calibrated else SDS
        return Search(beliefs(FactorModel(_groups(space)), where, prior_sd=prior_sd), _room(space))
    flat = FactorModel([FLAT] * len(space.rows))
    return Search(beliefs(flat, where, WIDE, prior=_level(space), prior_sd=SDS * 4), None)


def play(space: Space, *, with_prior: bool = True) -> Score:
    """Search until nothing is left. with_prior: as of `search_in`."""
    search = search_in(space, with_prior=with_prior)
    num_trials, picked = 0, None
    while (index := search.next()) is not None:
        search.learn(Trial(index, space.rows[index].step_time_s))
        if not num_trials and search.chance_of_better() < CHANCE:
            num_trials, picked = len(search.trials), search.best.index if search.best else None
    order = tuple(trial.index for trial in search.trials)
    if not num_trials:
        num_trials, picked = len(order), search.best.index if search.best else None
    return Score(space, order, num_trials, picked)


def _level(space: Space) -> "np.typing.NDArray[np.float64]":
    """Return factors that make a flat model about right: all that a search without a prior knows beforehand."""
    known = [row.step_time_s for row in space.rows if row.step_time_s is not None]
    factors = np.zeros(len(SDS))
    factors[0] = math.log(np.median(known)) if known else 0.0
    return factors


def _groups(space: Space) -> list[StepGroups]:
    groups = []
    for row in space.rows:
        model = space.model_of(row.layout.tp)
        groups.append(time_model(model, space.gpu, space.precision).groups(row.layout))
    return groups


def _room(space: Space) -> Room | None:
    if space.gpu.memory_gib is None:
        return None
    try:
        stages = [
            memory_per_stage(space.model_of(row.layout.tp), row.layout, assumptions_for(space.gpu))
            for row in space.rows
        ]
    except BadInput:
        return None
    return Room([worst_stage(each).total / GIB for each in stages], space.gpu.memory_gib)


def random_order(space: Space, seed: int) -> list[int]:
    """Return the rows shuffled."""
    order = list(range(len(space.rows)))
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, no secret
    return order


def without_prior(space: Space, seed: int) -> Sequence[int]:
    """Return the order of the same search that knows nothing beforehand."""
    del seed
    return play(space, with_prior=False).order
