"""Put the emulation in the place of Transformer Engine's functions, and answer what its Python asks of the machine."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformer_engine_torch as tex
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp_buffer
from transformer_engine.pytorch import permutation, quantization
from transformer_engine.pytorch.cpp_extensions import gemm as te_gemm
from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage, nvfp4_tensor_storage
from transformer_engine.pytorch.triton import cross_entropy as triton_cross_entropy

from tests.transformer_engine.emulation import (
    activations,
    attention,
    gemm,
    loss,
    master_weights,
    moe,
    norms,
    optimizer,
    quantize,
)

_MODULES = (norms, attention, gemm, moe, optimizer, quantize, master_weights)
_MACHINE: dict[str, Callable[..., Any]] = {
    "get_fused_attn_backend": lambda parameters: (tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "emulated"),
    "get_cublasLt_version": lambda: 130500,
    "get_cudnn_version": lambda: 91700,
    "get_num_cublas_streams": lambda: 1,
    "device_supports_multicast": lambda device_id=-1: False,
    "get_stream_priority_range": lambda device_id=-1: (0, 0),
}


@contextmanager
def emulated(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Have Transformer Engine compute by the emulation, as on a GPU of this compute capability."""
    with ExitStack() as stack:
        for target, name, value in (*_replaced_functions(), *_answers(capability)):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        quantize.ROUNDING.manual_seed(0)
        _forget()
        stack.callback(_forget)
        yield


def _forget() -> None:
    """Have Transformer Engine ask again what the machine can do, and forget the state of delayed scaling."""
    for module in _importers("transformer_engine."):
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType):  # nvdlfw_inspect's raises for what it does not know
                continue
            is_of_nvfp4 = getattr(value, "__module__", "") == "transformer_engine.pytorch.tensor.nvfp4_tensor"
            if (clear := getattr(value, "cache_clear", None)) and not is_of_nvfp4:  # matrices that tensors still need
                clear()
    quantization.FP8GlobalStateManager.reset()


def functions() -> dict[str, Callable[..., Any]]:
    """Return name -> emulation of a function of Transformer Engine's extension."""
    made = dict(activations.functions()) | _MACHINE
    for module in _MODULES:
        made |= {name: each for name, each in vars(module).items() if inspect.isfunction(each) and hasattr(tex, name)}
    return made


def _replaced_functions() -> Iterator[tuple[Any, str, Any]]:
    emulations = functions()
    originals = {id(getattr(tex, name)): each for name, each in emulations.items()}
    for module in [tex, *_importers("transformer_engine.", "megatron.core.", "cloudai_mbridge.")]:
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                yield module, name, originals[id(value)]
    for name in ("cross_entropy_forward", "cross_entropy_backward"):
        yield triton_cross_entropy, name, getattr(loss, name)
    for storage in (mxfp8_tensor_storage._FromMXFP8Func, nvfp4_tensor_storage._FromNVFP4Func):
        yield storage, "forward", staticmethod(quantize.dequantize_for_autograd)  # moves the tensor to a GPU
    yield permutation, "triton_permutation", moe.Triton


def _importers(*starts: str) -> list[ModuleType]:
    return [each for name, each in list(sys.modules.items()) if name.startswith(starts) and each is not None]


def _answers(capability: tuple[int, int]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what the machine answers, as one with a GPU would."""
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, total_memory=80 << 30, name="emulated"
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
    }
    for name, value in answers.items():
        yield torch.cuda, name, lambda *_, value=value, **__: value
    for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        yield quantization, name, None
    yield te_gemm, "get_cublas_workspace_size_bytes", lambda: 1024
    for module in (param_and_grad_buffer, fsdp_buffer):
        yield module, "_coalescing_manager", _one_by_one
    yield torch.Tensor, "is_cuda", property(_is_cuda)


@contextmanager
def _one_by_one(group: Any, async_ops: bool = False) -> Iterator[Any]:
    """Run the collectives of a group of buckets each by itself: gloo puts bytes and bf16 into one buffer of bytes."""
    works: list[Any] = []

    def started(collective: Any) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            works.append(collective(*args, **{**kwargs, "async_op": True}))
            return works[-1]

        return start

    places: list[tuple[Any, str]] = [
        *((dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")),
        *((param_and_grad_buffer, name) for name in ("dist_all_gather_func", "dist_reduce_scatter_func")),
    ]
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(mock.patch.object(module, name, started(getattr(module, name))))
        yield (handle := SimpleNamespace(wait=lambda: [work.wait() for work in works]))
    if not async_ops:
        handle.wait()


def _is_cuda(tensor: torch.Tensor) -> bool:
    """Answer True to Transformer Engine, also in its custom operators, where no function mode is active."""
    return str(sys._getframe(1).f_globals.get("__name__")).startswith("transformer_engine.")
