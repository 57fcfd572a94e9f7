"""Counts of a step: FLOPs by phase, bytes kept for the backward pass, and who works on which micro-batch when."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.pipeline_parallel import schedules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cloudai_mbridge.training.dry.allocator import Block, CachingAllocator
from cloudai_mbridge.training.dry.communication import Recorder


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of matrix products; those of attention are noted by its stand-in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "other"
        self.by_phase: Counter[str] = Counter()

    def note(self, flops: int) -> None:
        """Add FLOPs to the running phase."""
        self.by_phase[self.phase] += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.by_phase[self.phase] += count(*args, **(kwargs or {}), out_val=out)
        return out


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that a step makes and has not let go of yet, at their peak in every phase.

    They come on top of what is there before a step: weights, gradients and the optimizer's states. flops: knows the
    running phase. allocator: gets and gives back the same tensors.
    """

    def __init__(self, flops: Flops, allocator: CachingAllocator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peaks: Counter[str] = Counter()
        self._flops, self._allocator, self._now = flops, allocator, 0
        self._live: dict[int, tuple[int, Block]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:  # of a storage that is there
            return out
        given = None
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if type(each) is not torch.Tensor:
                continue
            storage = each.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            if given is None:  # in place, or into a tensor that is given
                given = {part.untyped_storage()._cdata for part in _tensors(args, kwargs)}
            if key not in given:
                weakref.finalize(storage, self._free, key).atexit = False
                self._make(key, storage.nbytes())
        return out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that has another size now."""
        if storage._cdata in self._live:
            self._free(storage._cdata)
            self._make(storage._cdata, storage.nbytes())

    def _free(self, key: int) -> None:
        size, block = self._live.pop(key)
        self._allocator.free(block)
        self._now -= size

    def _make(self, key: int, size: int) -> None:
        self._live[key] = size, self._allocator.allocate(size)
        self._now += size
        if self._now > self.peaks[self._flops.phase]:
            self.peaks[self._flops.phase] = self._now


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for value in (*args, *(kwargs or {}).values()):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if type(each) is torch.Tensor or type(each) is torch.nn.Parameter:
                yield each


class Place(NamedTuple):
    """Where a tensor was kept: model chunk, and layer from 1; 0: outside of the layers."""

    chunk: int
    layer: int


class _Kept:
    """A saved tensor; it dies when autograd lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Kept:
    """Bytes that autograd keeps, by place, now and at their peak. Weights don't count, a storage counts once."""

    def __init__(self, chunks: list[Any]) -> None:
        self._ignored = {each.untyped_storage()._cdata for each in _weights(chunks)}
        self._live: dict[int, list[Any]] = {}  # storage, bytes, place, number of times it is saved
        self._now: Counter[Place] = Counter()
        self._total = self.peak = 0
        self._at_peak: dict[Place, int] = {}
        self._is_newest = False
        self.place = Place(0, 0)
        self.per_pass: dict[Place, int] = {}
        self._chunks = chunks

    @contextmanager
    def counting(self, resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
        """Count what is saved inside. resized: called, too, with a storage that has another size now."""
        handles = [
            each.register_forward_pre_hook(self._enter_layer(number))
            for chunk in self._chunks
            for number, each in _layers(chunk)
        ]
        handles += [
            each.register_forward_hook(self._leave_layer) for chunk in self._chunks for _, each in _layers(chunk)
        ]
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            resized(storage)
            return result

        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
                mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            ):
                yield
        finally:
            for each in handles:
                each.remove()

    def at_peak(self) -> list[dict[str, int]]:
        """Return the bytes at the peak by chunk and layer."""
        if self._is_newest:
            self._at_peak, self._is_newest = dict(self._now), False
        kept = sorted(self._at_peak.items())
        return [{"chunk": place.chunk, "layer": place.layer, "bytes": size} for place, size in kept if size]

    def _enter_layer(self, number: int) -> Any:
        def hook(*args: Any) -> None:
            self.place = Place(self.place.chunk, number)

        return hook

    def _leave_layer(self, *args: Any) -> None:
        self.place = Place(self.place.chunk, 0)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storages = {each._cdata: each for each in (part.untyped_storage() for part in parts_of(tensor))}
        keys = [key for key in storages if key not in self._ignored]
        if not keys:
            return tensor
        for key in keys:
            if (found := self._live.get(key)) is None:
                size = storages[key].nbytes()
                self._live[key] = [storages[key], size, self.place, 1]
                self._add(self.place, size)
            else:
                found[3] += 1
        kept = _Kept(tensor)
        weakref.finalize(kept, self._forget, keys)
        return kept

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Follow outputs that are freed while they are saved, and come back when they have been recomputed."""
        if (found := self._live.get(storage._cdata)) is not None:
            self._add(found[2], storage.nbytes() - found[1])
            found[1] = storage.nbytes()

    def _add(self, place: Place, size: int) -> None:
        if size < 0 and self._is_newest:
            self._at_peak, self._is_newest = dict(self._now), False
        self._now[place] += size
        self._total += size
        if self._total > self.peak:
            self.peak, self._is_newest = self._total, True

    def _unpack(self, kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept.tensor

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            found = self._live[key]
            found[3] -= 1
            if not found[3]:
                self._add(found[2], -found[1])
                del self._live[key]


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a quantized one of Transformer Engine is made of; of another, itself."""
    if not hasattr(tensor, "_quantizer"):
        return [tensor]
    return [part for part in vars(tensor).values() if type(part) is torch.Tensor]


def _weights(chunks: list[Any]) -> Iterator[torch.Tensor]:
    """Yield what holds parameters and their quantized copies, which last from one micro-batch to the next."""
    for chunk in chunks:
        copies = (each for module in chunk.modules() for each in getattr(module, "_fp8_workspaces", {}).values())
        for each in (*chunk.parameters(), *copies):
            yield from parts_of(each)


def _layers(chunk: Any) -> Iterator[tuple[int, Any]]:
    for module in chunk.modules():
        if (number := getattr(module, "layer_number", None)) is not None and hasattr(module, "self_attention"):
            yield int(number), module


class StepObserver:
    """Follows Megatron-Core's schedule: which pass of which chunk and micro-batch runs.

    timeline: ["forward" or "backward", chunk, micro-batch], in order.
    """

    def __init__(self, recorder: Recorder, flops: Flops | None, kept: Kept | None) -> None:
        self.timeline: list[tuple[str, int, int]] = []
        self._recorder, self._flops, self._kept = recorder, flops, kept
        self._passes: Counter[tuple[str, int]] = Counter()
        self._chunk_of: dict[int, int] = {}

    @contextmanager
    def observing(self, chunks: list[Any]) -> Iterator[None]:
        """Observe the schedules that run inside."""
        forward, backward = schedules.forward_step, schedules.backward_step
        numbers = {id(each): number for number, each in enumerate(chunks)}

        def forward_step(step: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            chunk = numbers.get(id(model), 0)
            with self._during("forward", chunk):
                result = forward(step, iterator, model, *args, **kwargs)
            self._chunk_of[id(_first(result[0]))] = chunk
            return result

        def backward_step(inputs: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            with self._during("backward", self._chunk_of.get(id(_first(output)), 0)):
                return backward(inputs, output, *args, **kwargs)

        with mock.patch.multiple(schedules, forward_step=forward_step, backward_step=backward_step):
            yield

    @contextmanager
    def _during(self, kind: str, chunk: int) -> Iterator[None]:
        number = self._passes[kind, chunk]
        self._passes[kind, chunk] += 1
        self.timeline.append((kind, chunk, number))
        self._recorder.micro_batch = number
        if self._flops is not None:
            self._flops.phase = kind
        if self._kept is not None:
            self._kept.place = Place(chunk, 0)
        try:
            yield
        finally:
            if self._flops is not None:
                self._flops.phase = "other"


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
