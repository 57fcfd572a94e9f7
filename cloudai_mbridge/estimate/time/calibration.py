"""The coefficients as data: values, their provenance, and the model's errors on held-out rows."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from cloudai_mbridge.estimate.cluster import ClusterFactors, StepFactors
from cloudai_mbridge.estimate.precision import Precision
from cloudai_mbridge.estimate.time.coefficients import Powers, Setting, age, powers, trained_fraction
from cloudai_mbridge.estimate.time.parts import IdealTimes

_DATA = resources.files("cloudai_mbridge.estimate") / "data" / "calibration.toml"


@dataclass(frozen=True)
class Coefficient:
    """A number of the model. is_rate: an exponent or a yearly rate, not a factor.

    prior, prior_sd: what was expected before the fit and how firmly (of factors, in their logarithm). lower: what
    physics allows. is_fixed: the prior, since the rows do not determine it.
    """

    name: str
    value: float
    meaning: str
    prior: float
    prior_sd: float
    lower: float | None = None
    is_rate: bool = False
    is_fixed: bool = False

    @property
    def logarithm(self) -> float:
        """Term added to the logarithm of a time."""
        return self.value if self.is_rate else math.log(self.value)


@dataclass(frozen=True)
class HeldOutError:
    """Median absolute error on published rows whose configuration was not in the fit.

    recipe: None if the rows lack the recipe; the error is then of rows whose whole model was held out.
    median: the larger of that of the recipe's rows and that of all rows of the GPU and number format; infinite where
    no row is of these. is_of_cluster: the rows are points measured on a cluster, each held out of its calibration.
    device: GPU and number format. device_rows, own_rows: published rows of these, and how many are of the recipe.
    why_none: reason for no accuracy in spite of published rows.
    """

    recipe: str | None
    num_rows: int
    median: float
    is_of_cluster: bool = False
    device: str = ""
    device_rows: int = 0
    own_rows: int = 0
    why_none: str = ""

    @property
    def is_known(self) -> bool:
        """Whether anything was measured on the GPU in the number format."""
        return math.isfinite(self.median)

    def __str__(self) -> str:
        """Return a one-line summary."""
        if self.is_of_cluster:
            return f"calibrated: median error {100 * self.median:.0f} % on {self.num_rows} measured points, held out"
        if not self.is_known:
            return f"accuracy: none, as {self.why_none or f'no published row is of {self.device}'}"
        rows, own = f"{self.device_rows} published rows of {self.device}", self.own_rows or "none"
        return f"median error {100 * self.median:.0f} % on {rows}, {own} of this recipe, held out"


@dataclass(frozen=True)
class DeviceError:
    """Median absolute error on all published rows of a GPU in a number format. recipes: rows of each."""

    num_rows: int
    median: float
    recipes: Mapping[str, int]


@dataclass(frozen=True)
class Calibration:
    """All coefficients by name, the newest container, and the errors on held-out rows.

    errors: by recipe. device_errors: of all recipes, by GPU and number format.
    """

    coefficients: Mapping[str, Coefficient]
    newest_container: str
    source: str
    errors: Mapping[str, HeldOutError]
    new_model_error: HeldOutError
    device_errors: Mapping[tuple[str, str], DeviceError]

    def part_coefficients(self, setting: Setting) -> tuple[float, ...]:
        """Return the coefficient of every part, in order."""
        old = self._logarithm(age(setting, self.newest_container))
        return tuple(
            trained_fraction(part, setting) * math.exp(old + self._logarithm(powers(part, setting)))
            for part in IdealTimes._fields
        )

    def error_of(
        self,
        recipe: str,
        gpu: str,
        precision: Precision,
        measured: ClusterFactors | None = None,
        *,
        is_frozen: bool = False,
    ) -> HeldOutError:
        """Return the error to expect for a recipe on a GPU in a number format, on a cluster of these factors.

        is_frozen: only adapters are trained; the one published row of this kind is not in the fit.
        """
        if measured is not None and measured.step_time != StepFactors():
            return HeldOutError(None, measured.points, measured.held_out.calibrated, is_of_cluster=True)
        error, device = self.errors.get(recipe, self.new_model_error), f"{gpu} in {precision}"
        if is_frozen:
            return replace(error, median=math.inf, device=device, why_none="one published row is of adapters (5 % off)")
        if (there := self.device_errors.get((gpu, str(precision)))) is None:
            return replace(error, median=math.inf, device=device)
        median, own = max(error.median, there.median), there.recipes.get(recipe, 0)
        return replace(error, median=median, device=device, device_rows=there.num_rows, own_rows=own)

    def _logarithm(self, product: Powers) -> float:
        return sum(exponent * self.coefficients[name].logarithm for name, exponent in product)


@cache
def load_calibration() -> Calibration:
    """Read the calibration that comes with the package."""
    return parse_calibration(tomllib.loads(_DATA.read_text(encoding="utf-8")))


def parse_calibration(data: Mapping[str, Any]) -> Calibration:
    """Return the calibration in the data of its TOML."""
    coefficients = {name: Coefficient(name=name, **table) for name, table in data["coefficients"].items()}
    held_out = data["held_out"]
    errors = {name: HeldOutError(name, **table) for name, table in held_out["by_recipe"].items()}
    return Calibration(
        coefficients=MappingProxyType(coefficients),
        newest_container=data["newest_container"],
        source=data["source"],
        errors=MappingProxyType(errors),
        new_model_error=HeldOutError(None, **held_out["new_model"]),
        device_errors=MappingProxyType(
            {
                (gpu, precision): DeviceError(**table)
                for gpu, formats in held_out.get("by_gpu", {}).items()
                for precision, table in formats.items()
            }
        ),
    )
