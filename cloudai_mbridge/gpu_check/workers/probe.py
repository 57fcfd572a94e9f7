"""Print the facts of this machine: the GPU, the packages, whether Transformer Engine can be imported."""

import json
import os
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from cloudai_mbridge.gpu_check.kit import MUON

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "numpy", "apex", "flash-attn", MUON)


def main() -> None:
    import torch

    has_gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    facts = {
        "gpu": torch.cuda.get_device_name(0) if has_gpu else None,
        "no_gpu": "" if has_gpu else why_no_gpu(torch.version.cuda),
        "has_nvidia_smi": shutil.which("nvidia-smi") is not None and not is_hidden(),
        "memory_gib": properties.total_memory / 2**30 if properties else None,
        "no_transformer_engine": why_no_transformer_engine(has_gpu),
        "packages": {**{name: installed(name) for name in _PACKAGES}, "cuda": torch.version.cuda},
    }
    print(json.dumps(facts))


def why_no_gpu(cuda: str | None) -> str:
    """Return why torch cannot use a GPU. cuda: the version that torch was built for."""
    if cuda is None:
        return "torch is a CPU build"
    return "CUDA_VISIBLE_DEVICES hides all GPUs" if is_hidden() else "no GPU that torch can use"


def is_hidden() -> bool:
    """Return whether the environment hides all GPUs."""
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


if __name__ == "__main__":
    main()
