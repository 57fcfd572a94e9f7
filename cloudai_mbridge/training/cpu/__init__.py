"""Megatron-Core on CPU and gloo: `install` replaces, once per process, where it hard-codes CUDA; `megatron_device` must
surround every call into it. On a GPU, nothing is replaced."""

from cloudai_mbridge.training.cpu.install import import_megatron, install, megatron_device

__all__ = ["import_megatron", "install", "megatron_device"]
