"""Facts of this machine, each printed by a process of its own as one JSON object.

    python -m cloudai_mbridge.gpu_check.machine probe | matmul

`probe`: the GPU, the packages, whether Transformer Engine can be imported. `matmul`: the GPU's throughput in a large
bf16 matrix product, the reference peak of training steps.
"""

import json
import os
import shutil
import statistics
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cloudai_mbridge.gpu_check.kit import MUON

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "numpy", "apex", "flash-attn", MUON)
SIZE = 8192
WARM_UP = 5
PRODUCTS = 20
ROUNDS = 5


def probe() -> dict[str, Any]:
    """Return the facts in fields of `Device`."""
    import torch

    has_gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    return {
        "gpu": torch.cuda.get_device_name(0) if has_gpu else None,
        "no_gpu": "" if has_gpu else why_no_gpu(torch.version.cuda),
        "has_nvidia_smi": shutil.which("nvidia-smi") is not None and not is_hidden(),
        "memory_gib": properties.total_memory / 2**30 if properties else None,
        "no_transformer_engine": why_no_transformer_engine(has_gpu),
        "packages": {**{name: installed(name) for name in _PACKAGES}, "cuda": torch.version.cuda},
    }


def why_no_gpu(cuda: str | None) -> str:
    """Return why torch cannot use a GPU. cuda: the version that torch was built for."""
    if cuda is None:
        return "torch is a CPU build"
    return "CUDA_VISIBLE_DEVICES hides all GPUs" if is_hidden() else "no GPU that torch can use"


def is_hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def why_no_transformer_engine(has_gpu: bool) -> str:
    """Return why it is unusable, "" if usable. It is not imported without a GPU, as that may crash."""
    if not has_gpu:
        return "no GPU"
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # a library that does not fit the driver raises OSError, and others
        return f"{type(error).__name__}: {error}"
    return ""


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def matmul() -> dict[str, Any]:
    """Return the TFLOP/s of the product, by the device's own clock."""
    import torch

    # Random, not zeros: products of zeros draw less power and run at higher clocks.
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(WARM_UP):
        torch.matmul(a, b)
    seconds = []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(PRODUCTS):
            torch.matmul(a, b)
        stop.record()
        stop.synchronize()
        seconds.append(float(start.elapsed_time(stop)) / 1e3 / PRODUCTS)
    rate = 2 * SIZE**3 / statistics.median(seconds) / 1e12
    return {"size": SIZE, "dtype": "bf16", "tflops": rate, "rounds": ROUNDS, "products": PRODUCTS}


if __name__ == "__main__":
    print(json.dumps({"probe": probe, "matmul": matmul}[sys.argv[1]]()))
