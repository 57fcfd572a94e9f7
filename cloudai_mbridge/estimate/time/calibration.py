"""Coefficients that turn the ideal time of a step's part into its real time, as data, with the errors on held-out rows.

The time of a part is its ideal time times the product of its coefficients. Most of them are inverse efficiencies (1.4:
71 % of the peak); of communication, the share that is not hidden behind computation. The two yearly rates are the
software's: an older container is slower, and a point that is predicted for no container gets the newest.
"""

import csv
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import NormalDist, median
from types import MappingProxyType
from typing import Any, NamedTuple

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import ClusterFactors, Gpu, Precision, StepFactors, find_gpu
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.time.parts import IdealTimes

# From this container on, Megatron-Bridge's MXFP8 recipes for gated experts on Blackwell run one fused kernel for a
# rank's experts and record the iteration as one CUDA graph (scripts/performance/configs: cutedsl_fused_grouped_mlp)
FUSED_SINCE = "26.06"
_GPU_OF_REFERENCE_W = 1200 / 2500  # GB200, W per TFLOP/s in BF16
_BANDWIDTH_OF_REFERENCE = 8000  # of all Blackwell GPUs, GB/s
# Parts whose time is that of passes through memory
_IN_MEMORY = ("memory_matmul", "memory_experts", "memory_weights", "elementwise", "activation", "routing", "scan")
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
        return _computes_in_4_bits(self.gpu)

    @property
    def is_quantized(self) -> bool:
        """Whether matrix products are in fewer than 16 bits."""
        return self.precision not in _WIDE

    @property
    def is_fused(self) -> bool:
        """Whether a rank's experts are one kernel."""
        is_new = self.container is None or years(self.container) >= years(FUSED_SINCE)
        has_kernel = self.precision is Precision.FP8_MX and self.is_blackwell
        return is_new and has_kernel and self.model.num_moe_experts is not None and self.model.gated_linear_unit


class Switches(NamedTuple):
    """Settings of a layout that select coefficients.

    captured: the part of a step that CUDA graphs launch: "none", "router" (of the experts, and their preparation) or
    "full". overlaps_experts: the exchange of tokens with experts runs beside other micro-batches' computation.
    """

    captured: str = "none"
    overlaps_experts: bool = False


def switches_of(layout: ParallelLayout) -> Switches:
    """Return the switches of a layout."""
    captured = "full" if layout.cuda_graph == "full" else "router" if layout.captures_router else "none"
    return Switches(captured, layout.overlap_moe_expert_parallel_comm)


def years(container: str) -> float:
    """Return a container's date, such as 26.04.01, in years; BadInput if this is not a version."""
    if not re.fullmatch(r"\d\d\.\d\d(\.\d+)?", container):
        raise BadInput(f"container: {container!r} is not a version; write it as 26.04 or 26.04.01")
    year, month, *patch = container.split(".")
    return int(year) + (int(month) + 0.3 * bool(patch)) / 12


def powers(part: str, setting: Setting, switches: Switches) -> Powers:
    """Return the names of a part's coefficients, each with its exponent."""
    if part.startswith("matmul"):
        return (*((name, 1) for name in _of_matmul(part, setting)), *_sustained(setting))
    of_gpu = _sustained(setting) if part in ("attention_core", "sparse_core") else ()
    if part in _IN_MEMORY:
        of_gpu = _reached(setting)
    return ((part, 1), *of_gpu, *((name, 1) for name in _beside(part, setting, switches)))


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


def _reached(setting: Setting) -> Powers:
    """Kernels reach less of the peak of a faster memory."""
    ratio = (setting.gpu.memory_bandwidth_gb_s or _BANDWIDTH_OF_REFERENCE) / _BANDWIDTH_OF_REFERENCE
    return (("bandwidth", math.log(ratio)),)


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


def _beside(part: str, setting: Setting, switches: Switches) -> Iterator[str]:
    """Yield a part's coefficients, except the one of its own name."""
    if part in ("launches_moe", "launches_experts"):
        yield from _of_launches(setting, switches)
    if part in ("ep_nvlink", "ep_network") and switches.overlaps_experts:
        yield "overlapped"
    if part == "memory_experts" and setting.is_quantized:
        yield "quantised_experts"
    if part == "memory_matmul" and setting.is_quantized:
        yield "quantised"
        if setting.precision is Precision.FP8_MX:
            yield "quantised_mx"
    if setting.is_fused and part in ("memory_experts", "activation", "routing"):
        yield "fused_experts"
    if part == "activation" and setting.model.activation == "quick_gelu" and not setting.is_fused:
        yield "unfused_activation"


def _of_launches(setting: Setting, switches: Switches) -> Iterator[str]:
    if switches.captured == "full":
        yield "whole_graph"
        return
    if switches.captured == "router":
        yield "router_graph"
    if setting.gpu.host == "grace":
        yield "grace"
    if setting.is_quantized:
        yield "quantised_launches"


_FILES = resources.files("cloudai_mbridge.estimate") / "data"
_DATA, _HELD_OUT = _FILES / "calibration.toml", _FILES / "held_out.csv"


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


# Columns of held_out.csv: what was left out of the fit that predicted a row
SCHEMES = tuple(f"without_{name}" for name in ("row", "configuration", "cell", "recipe", "format", "gpu"))
ROW, CONFIGURATION, CELL, RECIPE, FORMAT, GPU = SCHEMES
LEVEL = 0.9
_LEAST_ROWS = 9  # the largest error of 9 is a bound at LEVEL


class HeldOutRow(NamedTuple):
    """A published row with log(predicted / measured) of fits that did not see it.

    layout: number of its configuration, which rows of other containers share. errors: by what was left out:
    the row; all rows of its configuration; of its cell (recipe, GPU and number format); of its recipe; of its GPU and
    number format; of its GPU.
    """

    recipe: str
    gpu: str
    precision: str
    layout: int
    errors: Mapping[str, float]


@dataclass(frozen=True)
class HeldOutError:
    """The error of step times on rows like a point that were held out of the fit; or of the nearest to such rows.

    median: of the absolute relative errors. log_bound: `LEVEL` of the errors of log(step time) are at most this.
    num_rows: of so many; 0 if there are none. of: which rows they are. why_unknown: no such row was measured, so that
    the errors are only of rows that are treated as if theirs had not been measured either; "" for a known error.
    is_of_device: steps were measured on the GPU in the number format, maybe of other recipes.
    """

    median: float
    log_bound: float
    num_rows: int
    of: str
    why_unknown: str = ""
    is_of_device: bool = True

    @property
    def is_known(self) -> bool:
        """Whether points like this one were measured."""
        return not self.why_unknown

    def interval_s(self, step_time_s: float) -> tuple[float, float] | None:
        """Return the bounds between which `LEVEL` of such step times are; None if the error is unknown."""
        if not self.is_known:
            return None
        return step_time_s * math.exp(-self.log_bound), step_time_s * math.exp(self.log_bound)

    def __str__(self) -> str:
        """Return a one-line summary."""
        if self.is_known:
            return f"median error {100 * self.median:.0f} % on {self.of}"
        if not self.num_rows:
            return f"unknown: {self.why_unknown}"
        within = f"{100 * LEVEL:.0f} % within {100 * math.expm1(self.log_bound):.0f} %"
        return f"unknown: {self.why_unknown}; {self.of}: median error {100 * self.median:.0f} %, {within}"


def bound_of(errors: Iterable[float], level: float = LEVEL) -> float:
    """Return the bound that the next error exceeds with a probability of 1 - `level`, if it is like these.

    Of the sorted absolute errors, number (n + 1) * `level` (split conformal prediction); of too few, the largest.
    """
    found = sorted(map(abs, errors))
    return found[min(math.ceil((len(found) + 1) * level), len(found)) - 1]


@dataclass(frozen=True)
class Calibration:
    """All coefficients by name, the newest container, and the errors on held-out rows."""

    coefficients: Mapping[str, Coefficient]
    newest_container: str
    source: str
    held_out: tuple[HeldOutRow, ...]

    def part_coefficients(self, setting: Setting, switches: Switches) -> tuple[float, ...]:
        """Return the coefficient of every part, in order."""
        old = self._logarithm(age(setting, self.newest_container))
        return tuple(
            trained_fraction(part, setting) * math.exp(old + self._logarithm(powers(part, setting, switches)))
            for part in IdealTimes._fields
        )

    def error_of(
        self,
        recipe: str,
        gpu: str,
        precision: Precision,
        measured: ClusterFactors | None = None,
        *,
        is_changed: bool = False,
        is_in_fit: bool = False,
        why_unlike: str = "",
    ) -> HeldOutError:
        """Return the error to expect for a recipe on a GPU in a number format, on a cluster of these factors.

        is_changed: the model has other sizes than the recipe's. is_in_fit: the very configuration was published.
        why_unlike: reason for no row to be like the point, such as another kind of training.
        """
        if measured is not None and measured.step_time != StepFactors():
            median = measured.held_out.calibrated
            normal = math.log1p(median) * _BOUND_OF_MEDIAN
            return HeldOutError(median, normal, measured.points, f"{measured.points} measured points, held out")
        where = f"{gpu} in {precision}"
        if why_unlike:
            return HeldOutError(math.inf, math.inf, 0, "", why_unlike)
        on_device = [row for row in self.held_out if (row.gpu, row.precision) == (gpu, str(precision))]
        own = [] if is_changed else [row for row in self.held_out if row.recipe == recipe]
        cell = [row for row in on_device if row in own]
        if cell:
            return self._of_known(cell, own, on_device, where, is_in_fit=is_in_fit)
        on_gpu = [row for row in self.held_out if row.gpu == gpu]
        more = ([] if own else [RECIPE]) + ([] if on_device else [FORMAT if on_gpu else GPU])
        near = on_device or on_gpu or [row for row in self.held_out if _is_blackwell(row.gpu) == _is_blackwell(gpu)]
        like = self._like(own, near)
        groups = [[row.errors[scheme] for row in rows] for scheme in (CELL, *more) for rows in (like, near) if rows]
        left_out = " and all of its ".join(_LEFT_OUT[scheme] for scheme in more or [CELL])
        of = f"of {len(like)} rows, each held out with all rows of its {left_out}"
        why = f"no published row is of {recipe} on {where}"
        if is_changed and any(row.recipe == recipe for row in on_device):
            why = f"the published rows of {recipe} on {where} are of other sizes"
        elif not on_device:
            why = f"no published row is of {where}"
        bounds = max(map(_median, groups)), max(map(bound_of, groups))
        return HeldOutError(*bounds, len(like), of, why, is_of_device=bool(on_device))

    def _like(self, own: list[HeldOutRow], near: list[HeldOutRow]) -> list[HeldOutRow]:
        """Return the rows of a recipe or near a device; all rows if these are too few for a bound."""
        like = [row for row in self.held_out if row in own or row in near]
        return like if len(like) >= _LEAST_ROWS else list(self.held_out)

    def _of_known(
        self, cell: list[HeldOutRow], own: list[HeldOutRow], near: list[HeldOutRow], where: str, *, is_in_fit: bool
    ) -> HeldOutError:
        """Return the error of a recipe with published rows on this device.

        Of a configuration that is in the fit, rows count whose configuration stayed there: in another container. If
        the cell has none, its rows are the fit's only word on it, and count as if their configurations were new.
        """
        scheme, like, rows = CONFIGURATION, self._like(own, near), cell
        if is_in_fit:
            number = Counter(row.layout for row in self.held_out)
            twins, own_twins = ([row for row in group if number[row.layout] > 1] for group in (like, cell))
            if len(twins) >= _LEAST_ROWS and own_twins:
                scheme, like, rows = ROW, twins, own_twins
        groups = [[row.errors[scheme] for row in group] for group in (like, rows) if group]
        held = "alone: others of its configuration are in the fit" if scheme == ROW else "with its configuration"
        which = f"this recipe or {where}" if len(like) < len(self.held_out) else "all recipes"
        of = f"{len(like)} published rows of {which} ({len(cell)} of both), each held out {held}"
        return HeldOutError(max(map(_median, groups)), max(map(bound_of, groups)), len(like), of)

    def _logarithm(self, product: Powers) -> float:
        return sum(exponent * self.coefficients[name].logarithm for name, exponent in product)


_LEFT_OUT = {CELL: "recipe, GPU and number format", RECIPE: "recipe", FORMAT: "GPU and number format", GPU: "GPU"}
# Of normal errors, the bound at `LEVEL` over the median
_BOUND_OF_MEDIAN = NormalDist().inv_cdf((1 + LEVEL) / 2) / NormalDist().inv_cdf(0.75)


def _is_blackwell(gpu: str) -> bool:
    known = find_gpu(gpu)
    return known is not None and _computes_in_4_bits(known)


def _computes_in_4_bits(gpu: Gpu) -> bool:
    return "fp4" in gpu.peak_tflops


def _median(errors: Iterable[float]) -> float:
    return median(abs(math.expm1(error)) for error in errors)


@cache
def load_calibration() -> Calibration:
    """Read the calibration that comes with the package."""
    return parse_calibration(tomllib.loads(_DATA.read_text("utf-8")), _HELD_OUT.read_text("utf-8"))


def parse_calibration(data: Mapping[str, Any], held_out: str) -> Calibration:
    """Return the calibration in the data of its TOML. held_out: the text of held_out.csv."""
    coefficients = {name: Coefficient(name=name, **table) for name, table in data["coefficients"].items()}
    lines = (line for line in held_out.splitlines() if not line.startswith("#"))
    rows = (
        HeldOutRow(
            columns["recipe"],
            columns["gpu"],
            columns["precision"],
            int(columns["layout"]),
            {scheme: float(columns[scheme]) for scheme in SCHEMES},
        )
        for columns in csv.DictReader(lines)
    )
    return Calibration(MappingProxyType(coefficients), data["newest_container"], data["source"], tuple(rows))
