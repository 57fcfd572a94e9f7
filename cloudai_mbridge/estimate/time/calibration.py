"""Coefficients that turn the ideal time of a step's part into its real time, as data, with the errors on held-out rows.

The time of a part is its ideal time times the product of its coefficients. Most of them are inverse efficiencies (1.4:
71 % of the peak); of communication, the share that is not hidden behind computation. The two yearly rates are the
software's: an older container is slower, and a point that is predicted for no container gets the newest.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import ClusterFactors, Gpu, Precision, StepFactors
from cloudai_mbridge.estimate.time.parts import IdealTimes

# From this container on, Megatron-Bridge's MXFP8 recipes for gated experts on Blackwell run one fused kernel for a
# rank's experts and record the iteration as one CUDA graph (scripts/performance/configs: cutedsl_fused_grouped_mlp)
FUSED_SINCE = "26.06"
_GPU_OF_REFERENCE_W = 1200 / 2500  # GB200, W per TFLOP/s in BF16
_WIDE = (Precision.BF16, Precision.FP32, Precision.TF32)

Powers = tuple[tuple[str, float], ...]


class Setting(NamedTuple):
    """Conditions that select a part's coefficients.

    container: None is the newest. is_frozen: only adapters are trained (LoRA).
    """

    model: Architecture
    gpu: Gpu
    precision: Precision
    container: str | None = None
    is_frozen: bool = False

    @property
    def is_blackwell(self) -> bool:
        """Whether the GPU computes in 4 bits; older GPUs are calibrated as Hopper."""
        return "fp4" in self.gpu.peak_tflops

    @property
    def is_fused(self) -> bool:
        """Whether a rank's experts are one kernel and the iteration one CUDA graph."""
        is_new = self.container is None or years(self.container) >= years(FUSED_SINCE)
        has_kernel = self.precision is Precision.FP8_MX and self.is_blackwell
        return is_new and has_kernel and self.model.num_moe_experts is not None and self.model.gated_linear_unit


def years(container: str) -> float:
    """Return a container's date, such as 26.04.01, in years; BadInput if this is not a version."""
    if not re.fullmatch(r"\d\d\.\d\d(\.\d+)?", container):
        raise BadInput(f"container: {container!r} is not a version; write it as 26.04 or 26.04.01")
    year, month, *patch = container.split(".")
    return int(year) + (int(month) + 0.3 * bool(patch)) / 12


def powers(part: str, setting: Setting) -> Powers:
    """Return the names of a part's coefficients, each with its exponent."""
    if part.startswith("matmul"):
        return (*((name, 1) for name in _of_matmul(part, setting)), *_sustained(setting))
    return ((part, 1), *((name, 1) for name in _beside(part, setting)))


def trained_fraction(part: str, setting: Setting) -> float:
    """Return the remaining fraction of a part: frozen weights have no gradient to compute, to reduce or to apply."""
    if not setting.is_frozen:
        return 1.0
    if part in ("dp_comm", "optimizer"):
        return 0.0
    return 2 / 3 if part.startswith(("matmul", "memory")) else 1.0


def age(setting: Setting, newest: str) -> Powers:
    """Return the yearly rate of the software and the number of years it applies."""
    if setting.container is None:
        return ()
    name = "year_dense" if setting.model.num_moe_experts is None else "year_moe"
    return ((name, max(0.0, years(newest) - years(setting.container))),)


def _sustained(setting: Setting) -> Powers:
    """Matmuls run at the clock that the power limit allows, not at that of the data sheet."""
    if not setting.is_blackwell or not setting.gpu.power_w:
        return ()
    watts = setting.gpu.power_w / setting.gpu.peak_tflops["bf16"]
    return (("power", -math.log(watts / _GPU_OF_REFERENCE_W)),)


def _of_matmul(part: str, setting: Setting) -> Iterator[str]:
    kind = Precision.BF16 if part == "matmul_output" else setting.precision
    if not setting.is_blackwell:
        yield "matmul_hopper_bf16" if kind in _WIDE else "matmul_hopper_fp8"
    else:
        names = {Precision.FP8_MX: "matmul_fp8_mx", Precision.NVFP4: "matmul_nvfp4"}
        yield "matmul_bf16" if kind in _WIDE else names.get(kind, "matmul_fp8")
    if part == "matmul_experts":
        yield "experts"
        if setting.is_fused:
            yield "fused_experts"
        if setting.precision is Precision.NVFP4:
            yield "experts_nvfp4"


def _beside(part: str, setting: Setting) -> Iterator[str]:
    """Yield a part's coefficients, except the one of its own name."""
    if part == "memory_matmul" and setting.precision not in _WIDE:
        yield "quantised"
        if setting.precision is Precision.FP8_MX:
            yield "quantised_mx"
    if setting.is_fused and part in ("memory_experts", "activation", "routing"):
        yield "fused_experts"
    if setting.is_fused and part in ("launches_moe", "launches_experts"):
        yield "whole_graph"
    if part == "activation" and setting.model.activation == "quick_gelu" and not setting.is_fused:
        yield "unfused_activation"


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
class Calibration:
    """All coefficients by name, the newest container, and the errors on held-out rows.

    errors: by recipe. device_errors: of all recipes by GPU, then by number format: `num_rows`, their `median` absolute
    error, and the rows of each of `recipes`.
    """

    coefficients: Mapping[str, Coefficient]
    newest_container: str
    source: str
    errors: Mapping[str, HeldOutError]
    new_model_error: HeldOutError
    device_errors: Mapping[str, Mapping[str, Any]]

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
        if (there := self.device_errors.get(gpu, {}).get(str(precision))) is None:
            return replace(error, median=math.inf, device=device)
        median, own = max(error.median, there["median"]), there["recipes"].get(recipe, 0)
        return replace(error, median=median, device=device, device_rows=there["num_rows"], own_rows=own)

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
        device_errors=held_out.get("by_gpu", {}),
    )
