"""Coefficients that turn the ideal time of a step's part into its real time.

The time of a part is its ideal time times the product of its coefficients. Most of them are inverse efficiencies (1.4:
71 % of the peak); of communication, the share that is not hidden behind computation. The two yearly rates are the
software's: an older container is slower, and a point that is predicted for no container gets the newest.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Gpu
from cloudai_mbridge.estimate.precision import Precision

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
