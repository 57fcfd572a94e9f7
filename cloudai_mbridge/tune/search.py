"""Which layout to measure next, and when another one is not worth its cost."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from cloudai_mbridge.tune.belief import Belief, Indices, Posterior
from cloudai_mbridge.tune.factors import Floats
from cloudai_mbridge.tune.room import Room

# The search ends where it is this improbable that any other layout is so much better
WORTH, CHANCE = 0.02, 0.05
_DRAWS, _LOOKED_AT = 2000, 512


@dataclass(frozen=True)
class Trial:
    """A measured layout. step_time_s: None where it ran out of memory."""

    index: int
    step_time_s: float | None


class Search:
    """A search among n layouts. room: None where memory is not known, so that all count as fitting."""

    def __init__(self, belief: Belief, room: Room | None, seed: int = 0) -> None:
        self._belief, self._room = belief, room
        self._draws = np.random.default_rng(seed)
        self.trials: list[Trial] = []
        self._gone: set[int] = set()

    @property
    def best(self) -> Trial | None:
        """The fastest trial so far; None where none has succeeded."""
        done = [trial for trial in self.trials if trial.step_time_s is not None]
        return min(done, key=lambda trial: trial.step_time_s or math.inf, default=None)

    def learn(self, trial: Trial) -> None:
        """Take in a trial."""
        self.trials.append(trial)
        self._gone.add(trial.index)
        if trial.step_time_s is not None:
            self._belief.learn(trial.index, trial.step_time_s)
        if self._room is not None:
            self._room.learn(trial.index, fits=trial.step_time_s is not None)

    def assume(self, index: int) -> None:
        """Take in that a layout is being measured: until then it counts as taking what is believed of it."""
        self._gone.add(index)
        self._belief.learn(index, float(np.exp(self._belief.posterior().mean[index])))

    def exclude(self, index: int) -> None:
        """Take in that a layout failed, for a reason that says nothing of others."""
        self._gone.add(index)

    def next(self) -> int | None:
        """Return the layout to measure next: the one with the largest expected improvement; None if none is left."""
        left = self._left(posterior := self._belief.posterior())
        if not left.any():
            return None
        fits = self._fits(len(left))
        best = self.best
        if best is None:  # the fastest of those that are likely to fit
            gain = fits * np.exp(-posterior.mean)
        else:
            sd = posterior.sd
            z = (math.log(best.step_time_s or math.inf) - posterior.mean) / sd
            gain = fits * sd * (z * ndtr(z) + np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi))
        return int(np.argmax(np.where(left, gain, -np.inf)))

    def chance_of_better(self, by: float = WORTH) -> float:
        """Return the probability that any unmeasured layout is faster than the best by this share; 1 without a best."""
        best = self.best
        if best is None or best.step_time_s is None:
            return 1.0
        posterior = self._belief.posterior()
        left = self._left(posterior)
        target = math.log(best.step_time_s) + math.log1p(-by)
        z = np.where(left, (target - posterior.mean) / posterior.sd, -np.inf)
        chosen: Indices = np.argsort(-z)[: min(_LOOKED_AT, int(left.sum()))]
        if not len(chosen):
            return 0.0
        root = _root(posterior.covariance(chosen))
        draws = posterior.mean[chosen] + self._draws.standard_normal((_DRAWS, len(chosen))) @ root.T
        fitting = self._draws.random((_DRAWS, len(chosen))) < self._fits(len(left))[chosen]
        return float(np.mean(((draws < target) & fitting).any(axis=1)))

    def _left(self, posterior: Posterior) -> "np.typing.NDArray[np.bool_]":
        left = np.ones(len(posterior.mean), dtype=bool)
        left[list(self._gone)] = False
        return left

    def _fits(self, number: int) -> Floats:
        return np.ones(number) if self._room is None else self._room.probabilities()


def _root(covariance: Floats) -> Floats:
    """Return a square root of a covariance that rounding may have made slightly indefinite."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
