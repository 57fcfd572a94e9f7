"""What is known of the points of a space before one of them is measured: a prediction, a guess, or nothing."""

from collections.abc import Mapping, Sequence

import numpy as np

from cloudai_mbridge.estimate.time.groups import StepGroups
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.tune.belief import Belief, Deviations, beliefs
from cloudai_mbridge.tune.factors import CALIBRATED_SDS, SDS, FactorModel, Floats
from cloudai_mbridge.tune.room import Room

# Where nothing is predicted: a level that the first trials tell, and deviations that may be large
_FLAT = StepGroups(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_WIDE = Deviations(shared=0.5, own=0.05)
_GUESS_SDS = 2 * SDS  # of another device's predictions, beside their common level
# That predictions for this device are no better than a guess: the GPU is not the one that was named, say
_DOUBT, _ANY_LEVEL = 0.01, 5.0


class Prior:
    """What a search believes of n points. where: of each, as of `positions_of`, [n, dimensions].

    groups: what is predicted of each; None where it is not, of one point at least. shares: likewise of memory.
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
        """Return it of points as they are planned; None for one of which nothing is known."""
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
        """Return the beliefs. measured: step times of points, of which all but predictions take their level."""
        if self.is_predicted:
            doubt = Belief(self._model, self._where, _WIDE, prior_sd=_GUESS_SDS, level_sd=_ANY_LEVEL, weight=_DOUBT)
            return *beliefs(self._model, self._where, prior_sd=self._prior_sd), doubt
        expected = self._model.log_times(np.zeros(len(SDS)))
        above = [float(np.log(seconds)) - expected[index] for index, seconds in measured.items()]
        level = np.full(len(SDS), np.mean(above) if above else 0.0)
        return beliefs(self._model, self._where, _WIDE, prior=level, prior_sd=self._prior_sd)

    def room(self) -> Room | None:
        """Return what is believed of the memory; None if it is not known, so that every point counts as fitting."""
        return None if self._shares is None else Room(self._shares, 1.0)
