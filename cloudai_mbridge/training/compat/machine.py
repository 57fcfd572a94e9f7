"""Training hardware and libraries of a machine. Standard library only: planning uses it without torch."""

from importlib.util import find_spec
from pathlib import Path

GPU, TRANSFORMER_ENGINE = "a GPU", "Transformer Engine and a GPU"
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def lacking() -> frozenset[str]:
    """Return which of GPU and TRANSFORMER_ENGINE this machine certainly lacks."""
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return frozenset({GPU, TRANSFORMER_ENGINE})
    return frozenset() if find_spec("transformer_engine") else frozenset({TRANSFORMER_ENGINE})
