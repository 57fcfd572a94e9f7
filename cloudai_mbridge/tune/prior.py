"""The prior of the points of a space before any measurement: a prediction, a guess, or none."""

from collections.abc import Mapping, Sequence

import numpy as np

from cloudai_mbridge.estimate.time.groups import StepGroups
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.tune.belief import Belief, Deviations, beliefs
from cloudai_mbridge.tune.factors import CALIBRATED_SDS, SDS, FactorModel, Floats
from cloudai_mbridge.tune.room import Room

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
