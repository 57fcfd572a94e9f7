"""Checkpoints of torch's FSDP2, in the format "torch_dist": Megatron-Core saves the local parts of DTensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cloudai_mbridge.training.checkpointing.optimizer_state import parts_of


def like(loaded: Any, current: Any) -> Any:
    """Return the value loaded for `current`, as a DTensor if `current` is a DTensor."""
    if not isinstance(current, DTensor) or not torch.is_tensor(loaded) or isinstance(loaded, DTensor):
        return loaded
    local = current.to_local()
    if loaded.shape != local.shape:  # fewer rows than ranks: Megatron-Core saves all of them on each rank
        parts = loaded.chunk(current.device_mesh.size())
        rank = current.device_mesh.get_local_rank()
        loaded = parts[rank] if rank < len(parts) else loaded[:0]
    return DTensor.from_local(
        loaded.to(local.dtype),
        current.device_mesh,
        current.placements,
        run_check=False,
        shape=current.shape,
        stride=current.stride(),
    )


def weights_like(loaded: dict[str, Any], chunk: torch.nn.Module) -> dict[str, Any]:
    """Return the loaded weights of a chunk in the form of its parameters."""
    current = dict(chunk.named_parameters())
    return {key: like(value, current.get(key)) for key, value in loaded.items()}


@contextmanager
def states_like_parameters(optimizer: Any) -> Iterator[None]:
    """Give the optimizers that load inside `with` states in the form of their parameters."""
    hooks = [part.optimizer.register_load_state_dict_pre_hook(_convert) for part in parts_of(optimizer)]
    copies = [_Copies(part) for part in parts_of(optimizer)]
    try:
        yield
    finally:
        for undo in (*hooks, *copies):
            undo.remove()


def _convert(inner: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    for group, theirs in zip(inner.param_groups, saved["param_groups"], strict=True):
        for param, number in zip(group["params"], theirs["params"], strict=True):
            state = saved["state"].get(number, {})
            state.update({key: like(value, param) for key, value in state.items() if key != "step"})


class _Copies:
    """Converts the main parameters of an optimizer in 16 bits, which Megatron-Core copies one by one."""

    def __init__(self, part: Any) -> None:
        self._part = part
        if hasattr(part, "fp32_from_float16_groups"):
            self._load = part.load_state_dict
            part.load_state_dict = self.load_state_dict

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load it as Megatron-Core does."""
        key = next(key for key in ("fp32_from_fp16_params", "fp32_from_fp16") if key in saved)
        pairs = zip(self._part.fp32_from_float16_groups, saved[key], strict=True)
        saved[key] = [[like(value, param) for param, value in zip(mine, theirs, strict=True)] for mine, theirs in pairs]
        self._load(saved)

    def remove(self) -> None:
        """Load as before again."""
        self._part.__dict__.pop("load_state_dict", None)
