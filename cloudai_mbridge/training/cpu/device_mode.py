"""Answer Megatron-Core's literal CUDA devices with the CPU, while a call into it is active."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GPU = "cuda"
_DTYPES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Byte", "Bool", "Short", "Char")
_GPU_TYPE_NAME = {f"torch.{name}Tensor": f"torch.{_GPU}.{name}Tensor" for name in _DTYPES}

_state = threading.local()
_installed = False


def _is_gpu(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith(_GPU)
    return isinstance(device, torch.device) and device.type == _GPU


class GpuMeansCpu(TorchFunctionMode):
    """Redirect GPU devices to the CPU; `.cuda()` is the identity, pinned memory is ordinary memory.

    `tensor.type()` answers with the GPU's type name, because Megatron's optimizers sort parameters by it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _GPU_TYPE_NAME.get(name, name)
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Surround calls into Megatron-Core with this; it does nothing until `install` found no GPU."""
    if not _installed:
        yield
        return
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        with GpuMeansCpu():
            yield
    finally:
        _state.depth -= 1


def follow_into_backward() -> None:
    """Keep the mode during the backward pass.

    torch suspends function modes inside `torch.autograd.backward`, where activation recomputation runs forward code.
    """
    global _installed
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not getattr(_state, "depth", 0):
            return engine(*args, **kwargs)
        with GpuMeansCpu():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run
    _installed = True
