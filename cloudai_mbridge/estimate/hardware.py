"""GPUs and number formats: dense peaks, memory, links, each with its source; and a cluster's calibration.

The figures are data (`data/hardware.toml`), and so are their sources. MFU divides by the dense peak of the format that
the matmuls run in; a processor has no figures here and so no MFU. `mbridge calibrate` writes a cluster's factors into
a file that a system references (docs/tune.md).
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.base import OneLine, StrictModel
from cloudai_mbridge.models.loading import validate
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.toml_source import read_toml


class Precision(StrEnum):
    """Number format of the layers' matrix products, by the names of `cmd_args.compute_dtype`."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP8_CS = "fp8_cs"
    FP8_DS = "fp8_ds"
    FP8_SC = "fp8_sc"
    FP8_MX = "fp8_mx"
    NVFP4 = "nvfp4"

    @property
    def is_32_bit(self) -> bool:
        """Whether weights and activations are stored in 32 bits."""
        return self in (Precision.FP32, Precision.TF32)

    @property
    def activation_bytes(self) -> int:
        """Bytes per value of the activations between layers."""
        return 4 if self.is_32_bit else 2


_OTHER_NAMES = {"fp8": Precision.FP8_CS, "mxfp8": Precision.FP8_MX, "fp16": Precision.BF16, "bfloat16": Precision.BF16}


def precision_named(name: str) -> Precision:
    """Return the precision called fp8_mx, FP8-MX, MXFP8, or FP8 (current scaling, as in the published tables).

    BadInput, which lists the known names, if unknown.
    """
    key = name.strip().lower().replace("-", "_")
    if key in _OTHER_NAMES:
        return _OTHER_NAMES[key]
    try:
        return Precision(key)
    except ValueError:
        raise BadInput(f"compute_dtype: unknown precision {name!r}; use one of {', '.join(Precision)}") from None


LEAST_FACTOR, MOST_FACTOR = 0.001, 1000.0
Factor = Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR)]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepFactors(StrictModel):
    """Ratios of measured to predicted time for each group of a step's parts (`estimate.time.parts`)."""

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


class FittedFactors(ClusterFactors):
    """What was fitted. is_better: than the predictions as they are; if not, all factors are 1. left_out: by reason."""

    is_better: bool
    left_out: Mapping[str, int]
    # Left out of the document: the number of measured peaks; the fit's median error, and its share of better
    # predictions, on points held out
    memory_points: Annotated[int, Field(exclude=True)]
    error: Annotated[float, Field(exclude=True)]
    share_better: Annotated[float, Field(exclude=True)]


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


_DATA = resources.files("cloudai_mbridge.estimate") / "data" / "hardware.toml"
_MAKERS = frozenset({"nvidia", "dgx", "hgx"})
# Suffixes that change no figure; a PCIe or NVL card of the same name is a different device
_FORMS = frozenset({"sxm", "sxm4", "sxm5", "sxm6", "ac", "80gb", "hbm3", "hbm3e", "nvl72"})


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links. Rates are dense and in one direction; None if the vendor claims none.

    peak_tflops: by number format (fp32, tf32, bf16, fp8, fp4), in 1e12 FLOP/s. memory_gib: as the driver reports it.
    memory_bandwidth_gb_s, nvlink_gb_s, nic_gb_s: 1e9 byte/s. nvlink_domain: GPUs that reach each other over NVLink.
    exp_per_s: exponentials, in 1e12/s. power_w: the module's limit. host: the CPU beside it.
    measured: factors on its predictions, measured on a cluster; None if unknown.
    """

    name: str
    peak_tflops: Mapping[str, float] = field(hash=False)
    gpus_per_node: int
    nvlink_domain: int
    source: str
    memory_gib: float | None = None
    memory_bandwidth_gb_s: float | None = None
    nvlink_gb_s: float | None = None
    nic_gb_s: float | None = None
    exp_per_s: float | None = None
    power_w: float | None = None
    host: Literal["x86", "grace"] = "x86"
    measured: ClusterFactors | None = None

    def peak(self, precision: Precision) -> float | None:
        """Return the dense peak in 1e12 FLOP/s, or None if the device has no tensor cores for it, or no figures.

        Block-scaled 8-bit numbers (MXFP8) came with 4-bit numbers.
        """
        if precision is Precision.FP8_MX and "fp4" not in self.peak_tflops:
            return None
        return self.peak_tflops.get("fp4" if precision is Precision.NVFP4 else precision.partition("_")[0])

    @property
    def is_known(self) -> bool:
        """Whether there are figures to estimate a time from."""
        return bool(self.peak_tflops)


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return all known devices by name."""
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))["gpus"]
    return MappingProxyType(
        {name: Gpu(name, MappingProxyType(table.pop("peak_tflops")), **table) for name, table in data.items()}
    )


@lru_cache(maxsize=256)
def find_gpu(name: str) -> Gpu | None:
    """Return the device of a name such as gb200, DGX-GB200 or NVIDIA H100 80GB HBM3, or None if unknown.

    Every name that begins with CPU is the processor.
    """
    words = [word for word in re.split(r"[\s_-]+", name.strip().lower()) if word not in _MAKERS]
    if words[:1] == ["cpu"]:
        return gpus()["cpu"]
    if not words or not set(words[1:]) <= _FORMS:
        return None
    return gpus().get("cpu" if words[0] == "local" else words[0])


def gpu_named(name: str) -> Gpu:
    """Return the device of a name; BadInput, which lists the known names, if unknown."""
    gpu = find_gpu(name)
    if gpu is None:
        raise BadInput(f"gpu_type: unknown GPU {name!r}; use one of {', '.join(gpus())}")
    return gpu


def mfu(tflops_per_gpu: float, gpu: Gpu, precision: Precision) -> float | None:
    """Return the share of the dense peak, or None if the device has no peak for the precision.

    tflops_per_gpu: model FLOPs, in 1e12 FLOP/s.
    """
    peak = gpu.peak(precision)
    return None if peak is None else tflops_per_gpu / peak


@dataclass(frozen=True)
class Price:
    """Of one GPU-hour."""

    per_gpu_hour: float
    currency: str


def price_of(system: System | None, gpu: str | None) -> tuple[Price | None, str]:
    """Return the price of the GPU of this name on a system, or None and the reason."""
    if not gpu:
        return None, "unknown GPU"
    if system is None or not system.prices.per_gpu_hour:
        return None, "the system has no [prices]"
    for name, price in system.prices.per_gpu_hour.items():
        if (found := find_gpu(name)) is not None and found.name == gpu:
            return Price(price, system.prices.currency), ""
    unknown = [repr(name) for name in system.prices.per_gpu_hour if find_gpu(name) is None]
    remark = f"; {', '.join(unknown)} is not a GPU with known figures" if unknown else ""
    return None, f"system {system.name!r}: [prices] has none for {gpu}{remark}"
