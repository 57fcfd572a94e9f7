"""Environment of this rank: the device, its driver and libraries, the packages. Part of the run's opening record."""

import platform
import socket
from pathlib import Path
from typing import Any

import torch

from cloudai_mbridge.training.compat.versions import installed_version
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.process.device import current_device, describe_device
from cloudai_mbridge.training.process.provenance import git_state, output_of, package_version, package_versions

_DRIVER_OF_THE_KERNEL = Path("/sys/module/nvidia/version")
_ENGINES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")


def describe_environment() -> dict[str, Any]:
    """Return the environment of this rank, None for unknown or missing parts. The process group must be up."""
    on_gpu = current_device().type != "cpu"
    engines = (package_version(name) for name in _ENGINES) if has_transformer_engine() else ()
    # `megatron.core.__version__` adds the commit of whatever repository lies around it, ours if it is in .venv
    known = {"torch": str(torch.__version__), "megatron-core": installed_version()}
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": known["torch"],
        "megatron_core": known["megatron-core"],
        "transformer_engine": next((found for found in engines if found), None),
        "cuda": torch.version.cuda,
        "nccl": _nccl() if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "device": describe_device(),
        "git": git_state(),
        "packages": dict(sorted({**package_versions(), **known}.items())),
    }


def _nccl() -> str | None:
    try:
        found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # a torch without NCCL
        return None
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _driver() -> str | None:
    """Read the version from the kernel, without delay, else from nvidia-smi, in a second or two on a big node."""
    try:
        return _DRIVER_OF_THE_KERNEL.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        lines = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return lines.splitlines()[0] if lines else None
