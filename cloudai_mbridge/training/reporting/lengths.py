"""The lengths of packed sequences: attention ends with each, so that its FLOPs follow the squares of their lengths."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training.data.packed_batch import sequence_lengths
from cloudai_mbridge.training.process.device import current_device, largest


class PackedLengths:
    """Counter of one step's packed sequences on this rank, and their sums over the data-parallel ranks.

    Context-parallel ranks draw the same sequences, and pipeline ranks without data count none. The first step decides
    for the run whether data-parallel ranks add up: they all have to.
    """

    def __init__(self) -> None:
        self._sums = (0, 0)
        self._is_packed = False
        self._are_shared: bool | None = None
        self.of_step: tuple[int, int] | None = None  # tokens, and squares, of the step that ended last; None: unpacked

    def counting(self, iterators: Any) -> Any:
        """Begin a step; return its iterators, of which the first model chunk's counts what it yields."""
        self._sums = (0, 0)
        if isinstance(iterators, list):
            return [self._counted(iterators[0]), *iterators[1:]]
        return self._counted(iterators)

    def end_step(self) -> None:
        """Add up the sums of all replicas. A collective, of packed runs and in the first step."""
        group = mpu.get_data_parallel_group()
        if self._are_shared is None:
            self._are_shared = bool(largest(self._is_packed, group=group)[0])
        if not self._are_shared:
            return
        sums = torch.tensor(self._sums, dtype=torch.int64, device=current_device())
        dist.all_reduce(sums, group=group)
        tokens, squares = sums.tolist()
        self.of_step = (tokens, squares) if tokens else None

    def _counted(self, iterator: Any) -> Any:
        if iterator is None or self._are_shared is False:
            return iterator
        return self._each(iter(partial(next, iterator), None))  # Megatron-Core's iterators only have `next`

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, dict) and torch.is_tensor(batch.get("tokens")):
                self._sums = tuple(map(sum, zip(self._sums, self._sums_of(batch), strict=True)))  # type: ignore[assignment]
            yield batch

    def _sums_of(self, batch: dict[str, Any]) -> tuple[int, int]:
        rows, length = batch["tokens"].shape[:2]
        if (lengths := sequence_lengths(batch)) is None:
            return rows * length, rows * length**2
        self._is_packed = True
        return length, int((lengths.long() ** 2).sum())
