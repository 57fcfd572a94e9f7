"""The choice of the next layout to measure, and the end of the search when another is not worth its cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from cloudai_mbridge.tune.belief import Belief, Floats, Room, shares

# The search ends if it is this improbable that any other layout is so much better
WORTH, CHANCE = 0.02, 0.05
_DRAWS, _LEAST_DRAWS, _NUMBERS = 2000, 200, 5_000_000  # of many layouts fewer draws, as that many numbers are drawn
_FAR = 6.0  # standard deviations: all layouts beyond together are not worth a look
_LEAST_SHARE = 1e-3  # of a belief that counts


@dataclass(frozen=True)
class Trial:
    """A measured layout. step_time_s: None if it ran out of memory.

    error: standard deviation of the logarithm; None: that of any measurement. is_cut: it was ended early, as slower
    than the best.
    """

    index: int
    step_time_s: float | None
    error: float | None = None
    is_cut: bool = False


class Search:
    """A search among n layouts.

    beliefs: one or more, weighed by the measurements. room: None if memory is unknown, so that all layouts count as
    fitting.
    """

    def __init__(self, beliefs: Sequence[Belief], room: Room | None, seed: int = 0) -> None:
        self._beliefs, self._room = beliefs, room
        self._draws = np.random.default_rng(seed)
        self.trials: list[Trial] = []
        self._gone: set[int] = set()

    @property
    def best(self) -> Trial | None:
        """The fastest trial so far; None if none has succeeded."""
        done = [trial for trial in self.trials if trial.step_time_s is not None and not trial.is_cut]
        return min(done, key=lambda trial: trial.step_time_s or math.inf, default=None)

    def learn(self, trial: Trial) -> None:
        """Record a trial."""
        self.trials.append(trial)
        self._gone.add(trial.index)
        if trial.step_time_s is not None:
            self._measured(trial.index, trial.step_time_s, trial.error)
        if self._room is not None:
            self._room.learn(trial.index, fits=trial.step_time_s is not None)

    def _measured(self, index: int, step_time_s: float, error: float | None = None) -> None:
        for belief in self._beliefs:
            belief.learn(index, step_time_s, error)

    def assume(self, index: int) -> None:
        """Record that a layout is being measured: until the result, its expected time is assumed."""
        self._gone.add(index)
        expected = sum(share * belief.mean[index] for share, belief in self._weighed())
        self._measured(index, math.exp(expected))

    def exclude(self, index: int) -> None:
        """Record that a layout failed for a reason unrelated to other layouts."""
        self._gone.add(index)

    def next(self) -> int | None:
        """Return the layout to measure next: the one with the largest expected improvement; None if none is left."""
        weighed = self._weighed()
        left = self._left(len(weighed[0][1].mean))
        if not left.any():
            return None
        gain = self._fits(len(left)) * sum(share * self._gain(belief) for share, belief in weighed)
        return int(np.argmax(np.where(left, gain, -np.inf)))

    def _gain(self, belief: Belief) -> Floats:
        """Return the expected improvement by every layout, [n]; before anything has succeeded, the fastest is best."""
        best = self.best
        if best is None or best.step_time_s is None:
            return np.asarray(np.exp(-belief.mean))
        sd = belief.sd
        z = (math.log(best.step_time_s) - belief.mean) / sd
        return np.asarray(sd * (z * ndtr(z) + np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi)))

    def chance_of_better(self, by: float = WORTH) -> float:
        """Return the probability that any unmeasured layout is faster than the best by this share; 1 without a best."""
        best = self.best
        if best is None or best.step_time_s is None:
            return 1.0
        target = math.log(best.step_time_s) + math.log1p(-by)
        likely = [(share, belief) for share, belief in self._weighed() if share > _LEAST_SHARE]
        return float(sum(share * self._chance_below(target, belief) for share, belief in likely))

    def _chance_below(self, target: float, belief: Belief) -> float:
        """Return the probability that the logarithm of any unmeasured layout's time is below the target."""
        left = self._left(len(belief.mean))
        chosen = np.flatnonzero(left & (belief.mean - target < _FAR * belief.sd))
        number = max(_LEAST_DRAWS, min(_DRAWS, _NUMBERS // max(len(chosen), 1)))
        fits, found = self._fits(len(left)), np.zeros(number, dtype=bool)
        for some, times in belief.draws(chosen, number, self._draws):
            fitting = self._draws.random(times.shape) < fits[some, None]
            found |= ((times < target) & fitting).any(axis=0)
        return float(found.mean())

    def _weighed(self) -> list[tuple[float, Belief]]:
        """Return each belief with its probability."""
        return list(zip(map(float, shares(self._beliefs)), self._beliefs, strict=True))

    def _left(self, number: int) -> "np.typing.NDArray[np.bool_]":
        left = np.ones(number, dtype=bool)
        left[list(self._gone)] = False
        return left

    def _fits(self, number: int) -> Floats:
        return np.ones(number) if self._room is None else self._room.probabilities()
