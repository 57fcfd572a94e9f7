"""Megatron-Core on CPU and gloo: `install` replaces, once per process, its hard-coded CUDA; `megatron_device` must
surround every call into it. On a GPU, nothing is replaced."""

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_done = False


def import_megatron() -> None:
    """Import Megatron-Core, without torch's compiler if no GPU is usable; does nothing if already imported.

    Megatron decorates its fused functions with torch.compile. To import the compiler takes as long as to import
    Megatron, and on a CPU the loop uses none of these functions (`startup/prepare.py`). Nor does it use Megatron's
    inference, which imports wandb: it finds none, and the loop's own logging imports the real one later.
    """
    if torch.cuda.is_available():
        return

    def uncompiled(function: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    compiler, torch.compile = torch.compile, uncompiled  # type: ignore[assignment]
    hides_wandb = sys.modules.setdefault("wandb", None) is None  # type: ignore[arg-type]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler
        if hides_wandb:
            del sys.modules["wandb"]


def install() -> bool:
    """Make Megatron-Core run on the CPU. Call it before anything of megatron.core runs, best before it is imported.

    Returns:
        True if the replacements are active; False if a GPU is usable: then only names are defined that
        Megatron-Core lacks without Transformer Engine.
    """
    global _done
    if not _done:
        import_megatron()
        define_missing_names()
    if torch.cuda.is_available():
        return False
    if not _done:
        _torch_cuda()
        _gloo()
        follow_into_backward()
        _rng()
        _moe()
        _uneven_collectives()
        _device_meshes()
        _offloading()
        _done = True
    return True


class _Inert:
    """Stands for a CUDA stream or event: on a CPU, work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inert)

    def __hash__(self) -> int:
        return 0

    def record_event(self, *args: Any) -> "_Inert":
        return _Inert()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, *args: Any) -> None: ...

    wait = wait_event = record = synchronize = wait_stream


def _torch_cuda() -> None:
    gpu: Any = torch.cuda
    gpu.current_device = lambda: 0
    gpu.synchronize = lambda device=None: None
    gpu.Stream = gpu.Event = _Inert
    gpu.current_stream = gpu.default_stream = lambda device=None: _Inert()
    gpu.nvtx.range_push = gpu.nvtx.range_pop = lambda *_: 0
    gpu.stream = lambda stream=None: contextlib.nullcontext()
    gpu.get_rng_state = lambda device="cpu": torch.get_rng_state()
    gpu.set_rng_state = lambda state, device="cpu": torch.set_rng_state(state)
    gpu.manual_seed = gpu.manual_seed_all = lambda seed: None  # torch would keep each call and its stack, for a GPU
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    # Megatron decorates its linear function with torch.amp.custom_bwd for a GPU
    warnings.filterwarnings("ignore", message=".*device_type of 'cuda'.*")


def _gloo() -> None:
    """Let all process groups share gloo's devices: each device has a thread that wakes a hundred times a second.

    Megatron-Core makes some thirty groups, each of which torch would give devices of its own.
    """
    c10d: Any = dist.distributed_c10d
    real = c10d.ProcessGroupGloo

    @functools.cache
    def devices(interfaces: str, process: int) -> list[Any]:
        return [real.create_device(interface=name) for name in interfaces.split(",") if name] or [
            real.create_default_device()
        ]

    class LikeGloo(type(real)):  # type: ignore[misc]
        """torch checks by the class what it returns itself, which is of the real one: so it sets time limits."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

    class SharingGloo(real, metaclass=LikeGloo):  # type: ignore[misc,valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = real._Options()
            options._devices = devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
            options._timeout, options._threads = timeout, 2 * len(options._devices)
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = SharingGloo


def _rng() -> None:
    from megatron.core.tensor_parallel import random as mrandom

    class CpuRNGStatesTracker(mrandom.CudaRNGStatesTracker):  # type: ignore[misc]
        """Megatron's tracker over torch's CPU generator."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"RNG state {name!r} or its seed {seed} exists already")
            self.seeds_.add(seed)
            before = torch.get_rng_state()
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

        @contextlib.contextmanager
        def fork(self, name: str = mrandom._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    def copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        """Fill the freed memory of a discarded output, without a change that autograd would see."""
        source = recomputed.untyped_storage()
        output.untyped_storage().resize_(source.size())
        output.untyped_storage().copy_(source)

    mrandom._CUDA_RNG_STATE_TRACKER = CpuRNGStatesTracker()
    mrandom._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    if hasattr(mrandom, "_get_share_storage"):  # 0.19 compiles a C++ extension for it, which takes a minute
        mrandom._get_share_storage = lambda: copy_storage
    mrandom._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mrandom._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _moe() -> None:
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # all_to_all_single wants its split sizes as ints; Megatron converts them only when they come from a GPU
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    kind = layers.RowParallelLinear
    forward = kind.forward

    # sequential experts add their bias in place, which autograd forbids on an output that one rank returns unchanged
    def forward_of_experts(self: Any, input_: Any) -> Any:
        output, bias = forward(self, input_)
        return (output.clone() if self.is_expert and bias is not None else output), bias

    kind.forward = forward_of_experts


def _uneven_collectives() -> None:
    """Give gloo unequal shapes: of experts that are both tensor- and expert-parallel, and of `dist_muon`'s weights."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def padded_gather(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        sizes = _uneven(group, output_split_sizes)
        if sizes is None:
            return gather(input_, group, None, use_global_buffer)
        longest = max(sizes)
        padded = input_.new_zeros([longest, *input_.shape[1:]])
        padded[: input_.size(0)] = input_
        full = input_.new_empty([len(sizes) * longest, *input_.shape[1:]])
        dist.all_gather_into_tensor(full, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(full.split(longest), sizes, strict=True)])

    def summed_scatter(input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        sizes = _uneven(group, input_split_sizes)
        if sizes is None:
            return scatter(input_, group, None, use_global_buffer)
        full = input_.clone()
        dist.all_reduce(full, group=group)
        return full.split(sizes)[group.rank()].contiguous()

    collectives: Any = dist
    all_gather = collectives.all_gather

    def padded_all_gather(tensors: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        longest = max(each.numel() for each in tensors)
        if all(each.numel() == longest for each in tensors):
            return all_gather(tensors, tensor, group, async_op)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.flatten()
        parts = [torch.empty_like(padded) for _ in tensors]
        all_gather(parts, padded, group)
        for each, part in zip(tensors, parts, strict=True):
            each.copy_(part[: each.numel()].view_as(each))
        return _Inert() if async_op else None

    collectives.all_gather = padded_all_gather
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = padded_gather, summed_scatter


def _device_meshes() -> None:
    """Build the meshes that Megatron shards parameters over (both kinds of FSDP) from CPU ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = DeviceMesh
    init = mesh.__init__

    def init_here(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, _redirection.device if _is_gpu(device_type) else device_type, *args, **kwargs)

    mesh.__init__ = init_here


class _HostCopies(TorchFunctionMode):
    """Treat tensors as GPU tensors (`is_cuda`), except results of `cpu()` and tensors derived from them."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_on_host = bool(args) and id(args[0]) in self._on_host
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not is_on_host
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and (is_on_host or func is torch.Tensor.cpu):
            self._on_host[id(result)] = result
        return result


def _offloading() -> None:
    """Let the optimizer that keeps a share of its states on the host choose that share."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    optimizer: Any = HybridDeviceOptimizer
    choose = optimizer._get_sub_optimizer_param_groups

    def choose_of_all(self: Any, offload_fraction: float) -> Any:
        with _HostCopies():
            return choose(self, offload_fraction)

    optimizer._get_sub_optimizer_param_groups = choose_of_all


def _uneven(group: Any, sizes: Any) -> list[int] | None:
    ints = [] if sizes is None else [int(size) for size in sizes]
    return ints if group.size() > 1 and len(set(ints)) > 1 else None


def define_missing_names() -> None:
    """Define the names that Megatron-Core lacks without Transformer Engine."""
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16: the router checks whether it is None
        moe_utils.te_general_gemm = None
    if not isinstance(mla.TELinear, type):  # the flag may be True and the class a mock
        mla.HAVE_TE = False


_GPU = "cuda"
_DTYPES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Byte", "Bool", "Short", "Char")
_GPU_TYPE_NAME = {f"torch.{name}Tensor": f"torch.{_GPU}.{name}Tensor" for name in _DTYPES}

_state = threading.local()


# The functions of which the mode changes positional arguments, or the result
_CHANGED = frozenset((torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.to, torch.Tensor.type, torch.device))


def _is_gpu(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith(_GPU)
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return is_number or (isinstance(device, torch.device) and device.type == _GPU)


class GpuMeansCpu(TorchFunctionMode):
    """Redirect GPU devices to the CPU; `.cuda()` is the identity, pinned memory is ordinary memory.

    `tensor.type()` answers with the GPU's type name, because Megatron's optimizers sort parameters by it.
    """

    device = "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in _CHANGED:  # most calls, hundreds of thousands in a short training
            return func(*args)
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device and args and isinstance(args[0], int):  # torch has no device for a number then
            return func("cpu")
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _GPU_TYPE_NAME.get(name, name)
        return func(*args, **kwargs)


_redirection: type[GpuMeansCpu] = GpuMeansCpu


def redirect_by(kind: type[GpuMeansCpu]) -> None:
    """Use another redirection of GPU devices from now on (`training.dry`)."""
    global _redirection
    _redirection = kind


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Surround calls into Megatron-Core with this; it does nothing until `install` found no GPU."""
    if not _done:
        yield
        return
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        with _redirection():
            yield
    finally:
        _state.depth -= 1


def follow_into_backward() -> None:
    """Keep the mode during the backward pass.

    torch suspends function modes inside `torch.autograd.backward`, although activation recomputation runs there.
    """
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with _redirection() if getattr(_state, "depth", 0) else contextlib.nullcontext():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run
