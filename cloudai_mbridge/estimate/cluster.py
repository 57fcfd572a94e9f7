"""Calibration of predicted time and memory on a cluster: measured factors, in a file that a system references.

`mbridge calibrate` writes it (docs/tune.md).
"""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cloudai_mbridge.models.base import OneLine, StrictModel
from cloudai_mbridge.models.loading import validate
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.toml_source import read_toml

LEAST_FACTOR, MOST_FACTOR = 0.001, 1000.0
Factor = Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR)]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepFactors(StrictModel):
    """Ratios of measured to predicted time for each group of a step's parts (`estimate.time.groups`)."""

    compute: Factor = 1.0
    memory: Factor = 1.0
    experts: Factor = 1.0
    links: Factor = 1.0
    launches: Factor = 1.0
    data_parallel: Factor = 1.0
    optimizer: Factor = 1.0


FACTORS = tuple(StepFactors.model_fields)


class HeldOut(StrictModel):
    """Median errors of step times on points that were not in the fit."""

    shipped: Error
    calibrated: Error


class ClusterFactors(StrictModel):
    """Factors on the predictions for one type of GPU. memory: on the peak of the fullest stage."""

    version: Literal[1] = 1
    gpu: OneLine
    points: Annotated[int, Field(ge=1)]
    step_time: StepFactors = StepFactors()
    memory: Factor = 1.0
    held_out: HeldOut

    def __str__(self) -> str:
        """Return a one-line summary."""
        return f"{self.points} measured points; median error {self.held_out.calibrated:.1%} on points held out"


@lru_cache(maxsize=16)
def read_factors(path: Path) -> ClusterFactors:
    """Read a file written by `mbridge calibrate`; BadInput: it cannot be read, or is invalid."""
    source = read_toml(path)
    return validate(ClusterFactors, source.data, source)


def factors_for(system: System | None, gpu: str) -> ClusterFactors | None:
    """Return a system's calibration factors for a GPU; None without any. BadInput as `read_factors`."""
    if system is None or system.calibration is None:
        return None
    found = read_factors(Path(system.calibration))
    return found if found.gpu == gpu else None


def calibration_note(system: System | None) -> str:
    """Return a one-line description of the calibration of a system's predictions; "" without one."""
    if system is None or system.calibration is None:
        return ""
    factors = read_factors(Path(system.calibration))
    return f"predictions for {factors.gpu} are calibrated: {system.calibration}, {factors}"
