"""GPUs: dense peaks by number format, memory, links; each with its source.

The figures are data (`data/hardware.toml`), and so are their sources. MFU divides by the dense peak of the format that
the matmuls run in; a processor has no figures here and so no MFU.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from types import MappingProxyType

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.cluster import ClusterFactors
from cloudai_mbridge.estimate.precision import Precision

_DATA = resources.files("cloudai_mbridge.estimate") / "data" / "hardware.toml"
_MAKERS = frozenset({"nvidia", "dgx", "hgx"})
# Suffixes that change no figure; a PCIe or NVL card of the same name is a different device
_FORMS = frozenset({"sxm", "sxm4", "sxm5", "sxm6", "ac", "80gb", "hbm3", "hbm3e", "nvl72"})


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links. Rates are dense and in one direction; None if the vendor claims none.

    peak_tflops: by number format (fp32, tf32, bf16, fp8, fp4), in 1e12 FLOP/s. memory_gib: as the driver reports it.
    memory_bandwidth_gb_s, nvlink_gb_s, nic_gb_s: 1e9 byte/s. nvlink_domain: GPUs that reach each other over NVLink.
    exp_per_s: exponentials, in 1e12/s. power_w: the module's limit.
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
