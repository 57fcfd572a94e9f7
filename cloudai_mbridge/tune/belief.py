"""The probability model of a space's step times: the time model, its factors, its residuals, and the measurements.

The logarithm of a step time is the model's at unknown factors, plus a smooth deviation that neighbouring layouts share,
plus a deviation of the layout alone, plus measurement noise; all Gaussian. The model is linearised at the most probable
factors. The size of a layout's own deviation is unknown: there is a belief for each of a few sizes, and the
measurements weigh them. Memory has a model of its own: predictions share an error, and each has a small one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

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


# Returns the logarithms of the step times of chosen layouts, [n], and their derivatives by every factor, [n, factors]
LogTimes = Callable[[Floats, npt.NDArray[np.intp] | slice], tuple[Floats, Floats]]


def log_times_of(groups: Sequence[StepGroups]) -> LogTimes:
    """Return the function of the step times of n layouts, from the groups of each.

    A vector of factors has their logarithms, in the order of `FACTORS`; with zeros the times are the time model's own.
    """
    seconds = np.array([[getattr(one, name) for name in FACTORS] for one in groups], dtype=float)
    bubbles = 1 + np.array([one.bubble for one in groups])

    def log_times(factors: Floats, chosen: npt.NDArray[np.intp] | slice) -> tuple[Floats, Floats]:
        real = seconds[chosen] * np.exp(factors)
        idle = bubbles[chosen]
        busy, launches = real[:, _BUSY].sum(axis=1), real[:, _LAUNCHES]
        longer = (busy**SHARPNESS + launches**SHARPNESS) ** (1 / SHARPNESS)  # `together_s` of many
        total = longer * idle + real[:, _LATE].sum(axis=1)
        shares = real / total[:, None]
        shares[:, _BUSY] *= (idle * (busy / longer) ** (SHARPNESS - 1))[:, None]
        shares[:, _LAUNCHES] *= idle * (launches / longer) ** (SHARPNESS - 1)
        return np.log(total), shares

    return log_times


ALL = slice(None)
_ROUNDS = 8
_CLOSE = 1e-4
_LEAST = 1e-12  # a variance that rounding would make negative
_WAVES, _AT_ONCE = 512, 4096
Indices = npt.NDArray[np.intp]


# Standard deviations of the logarithm: of what layouts share, of a layout alone, of a measurement
_SHARED, _OWN, _NOISE = 0.1, 0.03, 0.01
_RANGE = 1.5  # correlation length of what they share, in doublings of a size
# A layout's own deviation may also be this many times as large
_SCALES = (1.0, 3.0)


class Belief:
    """Step times of n layouts, some of them measured.

    positions: coordinates of the layouts, [n, dimensions]: the logarithms to base 2 of their sizes.
    shared, own, noise: standard deviations of the logarithm: of the deviation that neighbouring layouts share, of the
    layout's own, and of a measurement. range_: correlation length of the first, in doublings of a size.
    prior, prior_sd: of the factors' logarithms. level_sd: of the logarithm of one more factor, on all step times.
    weight: prior probability of this belief, relative to others.
    """

    def __init__(
        self,
        log_times: LogTimes,
        positions: Floats,
        prior: Floats | None = None,
        prior_sd: Floats = SDS,
        *,
        shared: float = _SHARED,
        own: float = _OWN,
        noise: float = _NOISE,
        range_: float = _RANGE,
        level_sd: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        self._log_times, self._positions, self.weight = log_times, positions, weight
        self._shared, self._own, self._noise, self._range = shared, own, noise, range_
        self._prior = np.zeros(len(prior_sd)) if prior is None else prior
        self._spread = np.diag(prior_sd**2) + level_sd**2  # to multiply all factors is to multiply the step times
        self._seen: list[int] = []
        self._logs: list[float] = []
        self._errors: list[float] = []
        self._kernel = np.empty((len(positions), 0))  # of all layouts with the measured layouts; grows with them
        self._is_current = False  # whether the following include all measurements
        self._mean, self._log_evidence = np.empty(0), 0.0
        # Factors of the covariances: of all layouts with the measured layouts, and how much each measurement moves each
        # mean, [measured, n]
        self._slopes, self._between, self._weights = np.empty((0, 0)), np.empty((0, 0)), np.empty((0, 0))

    @property
    def mean(self) -> Floats:
        """Means of the logarithm of every step time, [n], given the measurements."""
        self._update()
        return self._mean

    @property
    def log_evidence(self) -> float:
        """Logarithm of the probability of the measurements, under this belief."""
        self._update()
        return self._log_evidence

    @property
    def sd(self) -> Floats:
        """Standard deviations of the same, without the noise of a measurement, [n]."""
        self._update()
        prior = np.einsum("ij,jk,ik->i", self._slopes, self._spread, self._slopes) + (self._shared**2 + self._own**2)
        return np.asarray(np.sqrt(np.maximum(prior - np.einsum("ij,ji->i", self._between, self._weights), _LEAST)))

    def draws(self, chosen: Indices, number: int, rng: np.random.Generator) -> Iterator[tuple[Indices, Floats]]:
        """Draw the logarithms of the chosen layouts' times together; yield some layouts at a time, [some, number].

        A draw from the prior is updated by the measurements (Matheron's rule); the shared deviations are
        a sum of random waves.
        """
        self._update()
        seen = np.array(self._seen, dtype=np.intp)
        factors = rng.multivariate_normal(np.zeros(len(self._spread)), self._spread, number).T
        waves, heights = self._random_waves(rng), rng.standard_normal((_WAVES, number))

        def prior(layouts: Indices) -> Floats:
            own = self._own * rng.standard_normal((len(layouts), number))
            return np.asarray(self._slopes[layouts] @ factors + waves(layouts) @ heights + own)

        once, which = np.unique(seen, return_inverse=True)
        noise = np.array(self._errors)[:, None] * rng.standard_normal((len(seen), number))
        drawn = prior(once)[which] + noise
        for start in range(0, len(chosen), _AT_ONCE):
            some = chosen[start : start + _AT_ONCE]
            yield some, self._mean[some, None] + prior(some) - self._weights[:, some].T @ drawn

    def learn(self, index: int, step_time_s: float, error: float | None = None) -> None:
        """Add a measurement of a layout. error: standard deviation of its logarithm; None: the usual noise."""
        self._is_current = False
        self._seen.append(index)
        self._errors.append(self._noise if error is None else error)
        self._logs.append(float(np.log(step_time_s)))

    def _update(self) -> None:
        """Take the measurements into account, if there are new ones."""
        if self._is_current:
            return
        seen = np.array(self._seen, dtype=np.intp)
        factors = self._factors(seen)
        mean, slopes = self._log_times(factors, ALL)
        mean = mean + slopes @ (self._prior - factors)
        new = self._covariance(slice(None), seen[self._kernel.shape[1] :])
        self._kernel = np.hstack([self._kernel, new])
        between = slopes @ self._spread @ slopes[seen].T + self._kernel
        between[seen, np.arange(len(seen))] += self._own**2
        among = between[seen] + np.diag(np.square(self._errors))
        weights = np.asarray(np.linalg.solve(among, between.T), dtype=np.float64)
        surprise = np.array(self._logs) - mean[seen]
        self._log_evidence = -0.5 * float(surprise @ np.linalg.solve(among, surprise) + np.linalg.slogdet(among)[1])
        self._mean = mean + weights.T @ surprise
        self._slopes, self._between, self._weights = slopes, between, weights
        self._is_current = True

    def _factors(self, seen: Indices) -> Floats:
        """Return the most probable factors, by the Gauss-Newton method."""
        factors = self._prior
        if not len(seen):
            return factors
        own = np.diag(self._own**2 + np.square(self._errors))
        logs = np.array(self._logs)
        for _ in range(_ROUNDS):
            mean, slopes = self._log_times(factors, seen)
            gain = self._spread @ slopes.T
            among = slopes @ gain + self._covariance(seen, seen) + own
            offset = logs - mean - slopes @ (self._prior - factors)
            updated = self._prior + gain @ np.linalg.solve(among, offset)
            if np.abs(updated - factors).max() < _CLOSE:
                break
            factors = updated
        return factors

    def _covariance(self, rows: Indices | slice, columns: Indices) -> Floats:
        """Return the covariance of the shared deviations, [rows, columns]."""
        apart = self._positions[rows][:, None, :] - self._positions[columns][None, :, :]
        squares = np.square(apart / self._range).sum(axis=2)
        return np.asarray(self._shared**2 * np.exp(-squares / 2))

    def _random_waves(self, rng: np.random.Generator) -> Callable[[Indices], Floats]:
        """Return random waves, [layouts, waves]: by standard normal heights they add up to shared deviations."""
        frequencies = rng.standard_normal((self._positions.shape[1], _WAVES)) / self._range
        phases = rng.uniform(0, 2 * np.pi, _WAVES)
        scale = self._shared * np.sqrt(2 / _WAVES)
        return lambda layouts: np.asarray(scale * np.cos(self._positions[layouts] @ frequencies + phases))


def beliefs(
    log_times: LogTimes,
    positions: Floats,
    prior: Floats | None = None,
    prior_sd: Floats = SDS,
    *,
    shared: float = _SHARED,
    own: float = _OWN,
) -> tuple[Belief, ...]:
    """Return a belief for each size that a layout's own deviation may have."""
    return tuple(Belief(log_times, positions, prior, prior_sd, shared=shared, own=scale * own) for scale in _SCALES)


def shares(beliefs: Sequence[Belief]) -> Floats:
    """Return the probability of each belief, given measurements that all of them include."""
    logs = np.array([each.log_evidence + np.log(each.weight) for each in beliefs])
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
_WIDE_SHARED, _WIDE_OWN = 0.5, 0.05
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
        self._log_times = log_times_of(groups if groups is not None else [_FLAT] * len(where))
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
            doubt = Belief(
                self._log_times,
                self._where,
                prior_sd=_GUESS_SDS,
                shared=_WIDE_SHARED,
                own=_WIDE_OWN,
                level_sd=_ANY_LEVEL,
                weight=_DOUBT,
            )
            return *beliefs(self._log_times, self._where, prior_sd=self._prior_sd), doubt
        expected = self._log_times(np.zeros(len(SDS)), ALL)[0]
        above = [float(np.log(seconds)) - expected[index] for index, seconds in measured.items()]
        level = np.full(len(SDS), np.mean(above) if above else 0.0)
        return beliefs(self._log_times, self._where, level, self._prior_sd, shared=_WIDE_SHARED, own=_WIDE_OWN)

    def for_claims(self) -> "Prior":
        """Return the prior for statements about untried points: without predictions that were made for no such device.

        These say which point to try first, and nothing about how good it is.
        """
        return self if self.is_predicted else Prior(self._where, None, self._shares)

    def room(self) -> Room | None:
        """Return the memory model; None if memory is unknown, so that every point counts as fitting."""
        return None if self._shares is None else Room(self._shares, 1.0)
