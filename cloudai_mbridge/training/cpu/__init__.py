"""Megatron-Core on CPU and gloo, without touching its source. On a GPU, nothing is replaced.

Megatron-Core hard-codes CUDA in its RNG tracker, buffers, schedules and optimizers. `install` replaces those
places once per process; `megatron_device` must surround every call into Megatron-Core.
"""

from cloudai_mbridge.training.cpu.device_mode import megatron_device
from cloudai_mbridge.training.cpu.install import import_megatron, install

__all__ = ["import_megatron", "install", "megatron_device"]
