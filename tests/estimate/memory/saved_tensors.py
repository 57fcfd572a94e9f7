"""Count the bytes that autograd keeps alive for the backward pass, now and at most."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class _Kept:
    """A saved tensor; it dies when autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """Saved-tensor hooks. Storages count once, parameters not at all, and a storage counts with its present size."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._ignored = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._live: dict[int, list[Any]] = {}  # storage, number of times it is saved
        self.peak = 0

    def hooks(self) -> Any:
        """Return the context manager to run forward and backward passes in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def total(self) -> int:
        """Return the bytes kept now."""
        return sum(storage.nbytes() for storage, _ in self._live.values())

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return tensor
        self._live.setdefault(key, [storage, 0])[1] += 1
        self.peak = max(self.peak, self.total())
        kept = _Kept(tensor)
        weakref.finalize(kept, self._forget, key)
        return kept

    def _unpack(self, kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept.tensor

    def _forget(self, key: int) -> None:
        self._live[key][1] -= 1
        if not self._live[key][1]:
            del self._live[key]
