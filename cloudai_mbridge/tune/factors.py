"""The step times of many layouts as functions of a few factors: the error of each group of parts on this cluster."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cloudai_mbridge.estimate.cluster import FACTORS
from cloudai_mbridge.estimate.time.groups import SHARPNESS, StepGroups

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
