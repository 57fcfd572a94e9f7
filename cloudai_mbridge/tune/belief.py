"""The probability model of a space's step times: the time model, its factors, its residuals, and the measurements.

The logarithm of a step time is the model's at unknown factors, plus a smooth deviation that neighbouring layouts share,
plus a deviation of the layout alone, plus measurement noise; all Gaussian. The model is linearised at the most probable
factors. The size of a layout's own deviation is unknown: there is a belief for each of a few sizes, and the
measurements weigh them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cloudai_mbridge.tune.factors import SDS, FactorModel, Floats

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
