"""The probability model of a space's step times: the time model, its factors, its residuals, and the measurements.

The logarithm of a step time is the model's at unknown factors, plus a smooth deviation that neighbouring layouts share,
plus a deviation of the layout alone, plus measurement noise; all Gaussian. The model is linearised at the most probable
factors. The size of a layout's own deviation is unknown: there is a belief for each of a few sizes, and the
measurements weigh them. Memory has a model of its own: predictions share an error, and each has a small one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from cloudai_mbridge.estimate.hardware import FACTORS
from cloudai_mbridge.estimate.time.parts import SHARPNESS, StepGroups
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.tune.ranking import MEMORY_SD

Floats = npt.NDArray[np.float64]

# Prior of a factor's logarithm. Launches differ most: the host's clock, kernels
# that are fused or not, CUDA graphs
SDS = np.array([0.5, 0.5, 0.7, 0.7, 1.2, 0.7, 0.7])
# Of factors that were calibrated, mostly with other models of the same cluster
CALIBRATED_SDS = np.full(len(SDS), 0.2)
_BUSY = [FACTORS.index(name) for name in ("compute", "memory", "experts", "links")]
_LATE = [FACTORS.index(name) for name in ("data_parallel", "optimizer")]
_LAUNCHES = FACTORS.index("launches")


class FactorModel:
    """Times of n layouts, from the groups of each.

    A vector of factors has their logarithms, in the order of `FACTORS`; with zeros the times are the time
    model's own.
    """

    def __init__(self, groups: Sequence[StepGroups]) -> None:
        self._seconds = np.array([[getattr(one, name) for name in FACTORS] for one in groups], dtype=float)
        self._idle = 1 + np.array([one.bubble for one in groups])

    def log_times(self, factors: Floats, chosen: npt.NDArray[np.intp] | slice = slice(None)) -> Floats:
        """Return the logarithms of the step times of the chosen layouts, [n]."""
        return self._evaluate(factors, chosen)[0]

    def linearised(self, factors: Floats, chosen: npt.NDArray[np.intp] | slice = slice(None)) -> tuple[Floats, Floats]:
        """Return the same, and its derivatives by every factor, [n, factors]."""
        return self._evaluate(factors, chosen)

    def _evaluate(self, factors: Floats, chosen: npt.NDArray[np.intp] | slice) -> tuple[Floats, Floats]:
        real = self._seconds[chosen] * np.exp(factors)
        idle = self._idle[chosen]
        busy, launches = real[:, _BUSY].sum(axis=1), real[:, _LAUNCHES]
        longer = (busy**SHARPNESS + launches**SHARPNESS) ** (1 / SHARPNESS)  # `together_s` of many
        total = longer * idle + real[:, _LATE].sum(axis=1)
        shares = real / total[:, None]
        shares[:, _BUSY] *= (idle * (busy / longer) ** (SHARPNESS - 1))[:, None]
        shares[:, _LAUNCHES] *= idle * (launches / longer) ** (SHARPNESS - 1)
        return np.log(total), shares


_ROUNDS = 8
_CLOSE = 1e-4
_LEAST = 1e-12  # a variance that rounding would make negative
_WAVES, _AT_ONCE = 512, 4096
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of the logarithm.

    range_: correlation length, in doublings of a size.
    """

    shared: float = 0.1
    own: float = 0.03
    noise: float = 0.01
    range_: float = 1.5


_USUAL = Deviations()
# A layout's own deviation may also be this many times as large
_SCALES = (1.0, 3.0)


@dataclass(frozen=True)
class Posterior:
    """Means of the logarithm of every step time, [n], and the factors of their covariances.

    slopes: by the factors, [n, factors]. between: covariances with the measured layouts, [n, measured]. weights: how
    much each measurement moves each mean, [measured, n]. log_evidence: of the measurements, under this belief.
    """

    belief: "Belief"
    mean: Floats
    slopes: Floats
    between: Floats
    weights: Floats
    log_evidence: float

    @property
    def sd(self) -> Floats:
        """Standard deviations, [n], without the noise of a measurement."""
        prior = np.einsum("ij,jk,ik->i", self.slopes, self.belief.spread, self.slopes) + self.belief.own_variance
        return np.asarray(np.sqrt(np.maximum(prior - np.einsum("ij,ji->i", self.between, self.weights), _LEAST)))

    def draws(self, chosen: Indices, number: int, rng: np.random.Generator) -> Iterator[tuple[Indices, Floats]]:
        """Draw the logarithms of the chosen layouts' times together; yield some layouts at a time, [some, number].

        A draw from the prior is updated by the measurements (Matheron's rule); the shared deviations are
        a sum of random waves.
        """
        belief, seen = self.belief, np.array(self.belief.seen, dtype=np.intp)
        factors = rng.multivariate_normal(np.zeros(len(belief.spread)), belief.spread, number).T
        waves, heights = belief.waves(rng), rng.standard_normal((_WAVES, number))

        def prior(layouts: Indices) -> Floats:
            own = belief.deviations.own * rng.standard_normal((len(layouts), number))
            return np.asarray(self.slopes[layouts] @ factors + waves(layouts) @ heights + own)

        once, which = np.unique(seen, return_inverse=True)
        noise = np.array(belief.errors)[:, None] * rng.standard_normal((len(seen), number))
        drawn = prior(once)[which] + noise
        for start in range(0, len(chosen), _AT_ONCE):
            some = chosen[start : start + _AT_ONCE]
            yield some, self.mean[some, None] + prior(some) - self.weights[:, some].T @ drawn


class Belief:
    """Step times of n layouts, some of them measured.

    positions: coordinates of the layouts, [n, dimensions]: the logarithms to base 2 of their sizes.
    prior, prior_sd: of the factors' logarithms. level_sd: of the logarithm of one more factor, on all step times.
    weight: prior probability of this belief, relative to others.
    """

    def __init__(
        self,
        model: FactorModel,
        positions: Floats,
        deviations: Deviations = _USUAL,
        prior: Floats | None = None,
        prior_sd: Floats = SDS,
        *,
        level_sd: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        self._model, self._positions, self.deviations, self.weight = model, positions, deviations, weight
        self._prior = np.zeros(len(prior_sd)) if prior is None else prior
        self.spread = np.diag(prior_sd**2) + level_sd**2  # to multiply all factors is to multiply the step times
        self.seen: list[int] = []
        self._logs: list[float] = []
        self.errors: list[float] = []
        self._kernel = np.empty((len(positions), 0))  # of all layouts with the measured layouts; grows with them
        self._posterior: Posterior | None = None  # cached until the next measurement

    @property
    def own_variance(self) -> float:
        """Prior variance of a layout's deviation from the model."""
        return self.deviations.shared**2 + self.deviations.own**2

    def learn(self, index: int, step_time_s: float, error: float | None = None) -> None:
        """Add a measurement of a layout. error: standard deviation of its logarithm; None: the usual noise."""
        self._posterior = None
        self.seen.append(index)
        self.errors.append(self.deviations.noise if error is None else error)
        self._logs.append(float(np.log(step_time_s)))

    def posterior(self) -> Posterior:
        """Return the posterior of all layouts."""
        if self._posterior is None:
            self._posterior = self._believed()
        return self._posterior

    def _believed(self) -> Posterior:
        seen = np.array(self.seen, dtype=np.intp)
        factors = self._factors(seen)
        mean, slopes = self._model.linearised(factors)
        mean = mean + slopes @ (self._prior - factors)
        new = self.kernel(slice(None), seen[self._kernel.shape[1] :])
        self._kernel = np.hstack([self._kernel, new])
        between = slopes @ self.spread @ slopes[seen].T + self._kernel
        between[seen, np.arange(len(seen))] += self.deviations.own**2
        among = between[seen] + np.diag(np.square(self.errors))
        weights = np.asarray(np.linalg.solve(among, between.T), dtype=np.float64)
        surprise = np.array(self._logs) - mean[seen]
        log_evidence = -0.5 * float(surprise @ np.linalg.solve(among, surprise) + np.linalg.slogdet(among)[1])
        return Posterior(self, mean + weights.T @ surprise, slopes, between, weights, log_evidence)

    def _factors(self, seen: Indices) -> Floats:
        """Return the most probable factors, by the Gauss-Newton method."""
        factors = self._prior
        if not len(seen):
            return factors
        own = np.diag(self.deviations.own**2 + np.square(self.errors))
        logs = np.array(self._logs)
        for _ in range(_ROUNDS):
            mean, slopes = self._model.linearised(factors, seen)
            gain = self.spread @ slopes.T
            among = slopes @ gain + self.kernel(seen, seen) + own
            offset = logs - mean - slopes @ (self._prior - factors)
            updated = self._prior + gain @ np.linalg.solve(among, offset)
            if np.abs(updated - factors).max() < _CLOSE:
                break
            factors = updated
        return factors

    def kernel(self, rows: Indices | slice, columns: Indices) -> Floats:
        """Return the covariance of the shared deviations, [rows, columns]."""
        apart = self._positions[rows][:, None, :] - self._positions[columns][None, :, :]
        squares = np.square(apart / self.deviations.range_).sum(axis=2)
        return np.asarray(self.deviations.shared**2 * np.exp(-squares / 2))

    def waves(self, rng: np.random.Generator) -> Callable[[Indices], Floats]:
        """Return random waves, [layouts, waves]: by standard normal heights they add up to shared deviations."""
        frequencies = rng.standard_normal((self._positions.shape[1], _WAVES)) / self.deviations.range_
        phases = rng.uniform(0, 2 * np.pi, _WAVES)
        scale = self.deviations.shared * np.sqrt(2 / _WAVES)
        return lambda layouts: np.asarray(scale * np.cos(self._positions[layouts] @ frequencies + phases))


def beliefs(
    model: FactorModel,
    positions: Floats,
    deviations: Deviations = _USUAL,
    prior: Floats | None = None,
    prior_sd: Floats = SDS,
) -> tuple[Belief, ...]:
    """Return a belief for each size that a layout's own deviation may have."""
    sizes = (replace(deviations, own=scale * deviations.own) for scale in _SCALES)
    return tuple(Belief(model, positions, each, prior, prior_sd) for each in sizes)


def shares(posteriors: Sequence[Posterior]) -> Floats:
    """Return the probability of each belief, given measurements that all of them include."""
    logs = np.array([each.log_evidence + np.log(each.belief.weight) for each in posteriors])
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


_OWN_SD = 0.02
_STEPS = 401
_POINTS = 2001  # a fiftieth of a layout's own error apart


class Room:
    """The probability that each of n layouts fits. peaks: predicted, in the unit of `given`, the GPU's memory."""

    def __init__(self, peaks: Sequence[float] | Floats, given: float) -> None:
        self._excess = np.log(np.asarray(peaks, dtype=float)) - math.log(given)
        self._errors = np.linspace(-6 * MEMORY_SD, 6 * MEMORY_SD, _STEPS)
        self._logs = -np.square(self._errors / MEMORY_SD) / 2
        reach = 6 * (MEMORY_SD + _OWN_SD)
        self._points = np.linspace(-reach, reach, _POINTS)
        self._fits = ndtr(-(self._points[:, None] + self._errors) / _OWN_SD)

    def learn(self, index: int, *, fits: bool) -> None:
        """Record whether a layout has run out of memory."""
        over = (self._excess[index] + self._errors) / _OWN_SD
        self._logs = self._logs + np.log(np.maximum(ndtr(-over if fits else over), 1e-300))

    def probabilities(self) -> Floats:
        """Return the probability that each layout fits, [n]."""
        weights = np.exp(self._logs - self._logs.max())
        weights /= weights.sum()
        return np.asarray(np.interp(self._excess, self._points, self._fits @ weights))


# Without predictions: a level set by the first trials, and deviations that may be large
_FLAT = StepGroups(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_WIDE = Deviations(shared=0.5, own=0.05)
_GUESS_SDS = 2 * SDS  # of another device's predictions, in addition to their common level
# Probability that predictions for this device are as poor as a guess, for example because the GPU was misnamed
_DOUBT, _ANY_LEVEL = 0.01, 5.0


class Prior:
    """The prior of a search for n points. where: coordinates, as returned by `positions_of`, [n, dimensions].

    groups: prediction of each; None if at least one point has none. shares: likewise of memory.
    is_predicted: for this device.
    """

    def __init__(
        self,
        where: Floats,
        groups: Sequence[StepGroups] | None,
        shares: Sequence[float] | None,
        *,
        is_calibrated: bool = False,
        is_guess: bool = False,
    ) -> None:
        self._where, self._shares = where, shares
        self.is_predicted = groups is not None and not is_guess
        self._model = FactorModel(groups if groups is not None else [_FLAT] * len(where))
        self._prior_sd = SDS if groups is None else _GUESS_SDS if is_guess else CALIBRATED_SDS if is_calibrated else SDS

    @classmethod
    def of(cls, known: Sequence[SearchPlan | None], where: Floats) -> "Prior":
        """Return the prior of planned points. known: None for a point without predictions."""
        found = [each for each in known if each is not None]
        groups = [StepGroups(*each.groups) for each in found if each.groups]
        shares = [each.memory_share for each in found if each.memory_share]
        return cls(
            where,
            groups if groups and len(groups) == len(where) else None,
            shares if shares and len(shares) == len(where) else None,
            is_calibrated=any(each.is_calibrated for each in found),
            is_guess=any(each.is_guess for each in found),
        )

    def beliefs(self, measured: Mapping[int, float]) -> tuple[Belief, ...]:
        """Return the beliefs. measured: step times, which set the level without predictions for this device."""
        if self.is_predicted:
            doubt = Belief(self._model, self._where, _WIDE, prior_sd=_GUESS_SDS, level_sd=_ANY_LEVEL, weight=_DOUBT)
            return *beliefs(self._model, self._where, prior_sd=self._prior_sd), doubt
        expected = self._model.log_times(np.zeros(len(SDS)))
        above = [float(np.log(seconds)) - expected[index] for index, seconds in measured.items()]
        level = np.full(len(SDS), np.mean(above) if above else 0.0)
        return beliefs(self._model, self._where, _WIDE, prior=level, prior_sd=self._prior_sd)

    def room(self) -> Room | None:
        """Return the memory model; None if memory is unknown, so that every point counts as fitting."""
        return None if self._shares is None else Room(self._shares, 1.0)
