"""The machine of a rehearsal: torch answers as with one kind of GPU, GPU tensors are on the meta device, and the other
ranks are not there. Import it before Megatron-Core and Transformer Engine."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.dry import scans
from cloudai_mbridge.training.process.device import use_device

_META = torch.device("meta")
# Of Megatron-Core's memory for NCCL's user buffers, which it compiles an extension for
_ALLOCATOR = (
    *("init", "create_nccl_mem_pool", "register_mem_pool", "nccl_mem"),
    *("MultiGroupMemPoolAllocator", "MemPoolAllocatorWithoutRegistration"),
)


@dataclass(frozen=True)
class GpuFacts:
    """What torch tells of a GPU. memory: bytes. Source: NVIDIA's data sheets and CUDA's table of capabilities."""

    capability: tuple[int, int]
    multiprocessors: int
    memory_gib: int


GPUS = {
    "a100": GpuFacts((8, 0), 108, 80),
    "h100": GpuFacts((9, 0), 132, 80),
    "h200": GpuFacts((9, 0), 132, 141),
    "b200": GpuFacts((10, 0), 148, 180),
    "gb200": GpuFacts((10, 0), 148, 186),
    "b300": GpuFacts((10, 3), 148, 270),
    "gb300": GpuFacts((10, 3), 148, 279),
}


class GpuMeansMeta(cpu.GpuMeansCpu):
    """Redirect GPU devices to the meta device, whose tensors have shapes and no memory, and pass for GPU tensors.

    hides_meta: they pass for tensors with memory as well, of which Megatron-FSDP makes sure.
    """

    device = "meta"
    hides_meta = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if cpu._is_gpu(kwargs.get("device")):
            kwargs["device"] = "meta"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.device and args and isinstance(args[0], int):
            return _META
        if func is torch.Tensor.to and len(args) > 1 and cpu._is_gpu(args[1]):
            args = (args[0], _META, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args).replace("torch.meta.", "torch.")
            return cpu._GPU_TYPE_NAME.get(name, name)
        elif func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        elif self.hides_meta and func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **kwargs)


def install(kind: str) -> None:
    """Make this process a machine for rehearsals, once and for good. A GPU must not be visible to it.

    kind: of GPUS.
    """
    answers = _answers(kind)
    is_available = answers.pop("is_available")
    for name, answer in answers.items():  # Transformer Engine asks while it is imported
        setattr(torch.cuda, name, answer)
    cpu.install()  # which looks for a GPU
    torch.cuda.is_available = is_available
    cpu.redirect_by(GpuMeansMeta)
    use_device(_META)
    _without_driver()
    warnings.simplefilter("ignore")  # of Megatron-Core and torch, about their own calls


def _answers(kind: str) -> dict[str, Callable[..., Any]]:
    gpu = GPUS[kind]
    major, minor = gpu.capability
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.memory_gib << 30,
        name=f"NVIDIA {kind.upper()}",
    )
    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "device_count": 1,
        "is_current_stream_capturing": False,
    }
    return {name: lambda *args, _answer=answer, **kwargs: _answer for name, answer in answers.items()}


def _without_driver() -> None:
    """Replace what asks the driver, reads values, or compares what other ranks have sent, while a rank is built."""
    from megatron.core import nccl_allocator, parallel_state
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp_buffers

    from cloudai_mbridge.training import initialize

    def no_registration(*args: Any, **kwargs: Any) -> Any:
        return nullcontext()

    for name in _ALLOCATOR:
        if hasattr(nccl_allocator, name):
            setattr(nccl_allocator, name, no_registration)
    if hasattr(fsdp_buffers, "validate_uneven_dtensor"):  # by the sizes that the other ranks hold
        fsdp_buffers.validate_uneven_dtensor = lambda dtensor: None
    parallel_state.get_nccl_options = lambda *args: None  # which the fake group does not take
    FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda self: None
    objects: Any = dist  # through tensors, whose sizes would come from other ranks
    objects.broadcast_object_list = lambda *args, **kwargs: None
    objects.all_gather_object = _gather_own
    initialize.start_user_buffers = lambda *args: None  # type: ignore[attr-defined]
    scans.install()
    if find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.module import base
        from transformer_engine.pytorch.tensor import nvfp4_tensor

        base._ub_initialized, base._ub_communicators = True, {}
        nvfp4_tensor.get_sign_from_vector = lambda vector: 0  # of the Hadamard transform
        from cloudai_mbridge.training.dry import kernels

        kernels.install()


def _gather_own(gathered: list[Any], own: Any, group: Any = None) -> None:
    """Stand for `all_gather_object` among ranks that all hold the same."""
    gathered[:] = [own] * len(gathered)


@contextmanager
def as_rank(rank: int, world_size: int, gpus_per_node: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks are not there: communication returns at once, and has no result."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    local_size = min(world_size, gpus_per_node)
    places = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % local_size, "LOCAL_WORLD_SIZE": local_size}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in places.items()}):
        store: Any = FakeStore()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
        with cpu.megatron_device():
            yield
