"""A search, and what it is compared with, played against points that were measured."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cloudai_mbridge.tune.belief import Prior
from cloudai_mbridge.tune.measured_search import positions_of
from cloudai_mbridge.tune.search import CHANCE, Search, Trial
from tests.benchmarks.replay.case import Case

TOLERANCES = (0.05, 0.02)


@dataclass(frozen=True)
class Score:
    """How a search went.

    order: the points as it tried them, until it was within all tolerances and would have stopped. num_trials: after
    how many it would have. picked: the best by then, if any.
    """

    case: Case
    order: tuple[int, ...]
    num_trials: int
    picked: int | None

    @property
    def picked_s(self) -> float | None:
        """The step time of what it picked."""
        return None if self.picked is None else self.case.times[self.picked]

    def trials_to(self, tolerance: float) -> int | None:
        """Return after how many trials one was within this share of the best; None where no layout fits."""
        return trials_to(self.case, self.order, tolerance)


def trials_to(case: Case, order: Sequence[int], tolerance: float) -> int | None:
    """Return after how many trials in this order one was within a share of the best."""
    if case.best_s is None:
        return None
    good = case.best_s * (1 + tolerance)
    times = (case.times[index] for index in order)
    return next((number for number, seconds in enumerate(times, 1) if seconds is not None and seconds <= good), None)


def search_in(case: Case, *, with_prior: bool = True) -> Search:
    """Return a search that has tried nothing. with_prior: with what is predicted, where it is.

    Without predictions it knows the level of the step times from the start, not from its first trials.
    """
    prior = Prior(
        positions_of(case.coordinates),
        case.groups if with_prior else None,
        case.shares if with_prior else None,
        is_calibrated=case.is_calibrated,
        is_guess=case.is_guess,
    )
    known = {index: seconds for index, seconds in enumerate(case.times) if seconds is not None}
    return Search(prior.beliefs(known), prior.room())


def play(case: Case, *, with_prior: bool = True) -> Score:
    """Search until nothing more can be learned about the search. with_prior: as of `search_in`."""
    search = search_in(case, with_prior=with_prior)
    claims = search_in(case, with_prior=False) if with_prior and case.is_guess else search  # as the product's search
    num_trials, picked = 0, None
    while (index := search.next()) is not None:
        for each in dict.fromkeys((search, claims)):
            each.learn(Trial(index, case.times[index]))
        if not num_trials and claims.chance_of_better() < CHANCE:
            num_trials, picked = len(search.trials), search.best.index if search.best else None
        if num_trials and _is_within(case, search, min(TOLERANCES)):
            break
    order = tuple(trial.index for trial in search.trials)
    if not num_trials:
        num_trials, picked = len(order), search.best.index if search.best else None
    return Score(case, order, num_trials, picked)


def _is_within(case: Case, search: Search, tolerance: float) -> bool:
    """Return whether the best trial is within a share of the best point."""
    best = search.best.step_time_s if search.best else None
    return best is not None and case.best_s is not None and best <= case.best_s * (1 + tolerance)


def random_order(case: Case, seed: int) -> list[int]:
    """Return the points shuffled."""
    order = list(range(len(case.times)))
    random.Random(seed).shuffle(order)
    return order


def without_prior(case: Case, seed: int) -> Sequence[int]:
    """Return the order of the same search that knows nothing beforehand."""
    del seed
    return play(case, with_prior=False).order
