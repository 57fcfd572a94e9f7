"""Selection, loading and collation of the samples of a batch.

An order turns a position, the samples that the run has consumed, into an index of the dataset. The positions that a
data-parallel rank reads next are pure functions of it. Batches are loaded in this process or in workers.
"""

import contextlib
import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

Order = Callable[[int], int]  # position in the run -> index of the dataset, or FILLER
FILLER = -1  # a sample without loss, as long as the last one
# The samples that this rank reads at once, and the samples that all ranks together read
Request = tuple[list[int], list[int]]
Batch = dict[str, torch.Tensor]
Rows = list[dict[str, Any]]
Collate = Callable[[Rows, list[int]], Batch]  # of this rank's samples, and the indices of all ranks'
_UNIT = 16  # tokens; lengths are rounded up to it, so that kernels get few and even shapes


@dataclass(frozen=True)
class Share:
    """Part of every global batch that a data-parallel rank reads; all sizes in samples.

    Micro-batch k of rank r holds the samples from (k * replicas + r) * micro_batch_size of the global batch, so that
    the global batch is the same in every layout.
    """

    micro_batch_size: int
    rank: int
    replicas: int

    @property
    def step(self) -> int:
        """The samples of one micro-batch on every replica."""
        return self.micro_batch_size * self.replicas

    def rows(self, first: int) -> range:
        """Return the positions of this rank's micro-batch, if rank 0's begins at `first`."""
        start = first + self.rank * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


def in_order(total: int, epoch: int) -> Order:
    """One sample after the other, over and over; only the first `epoch` of `total` samples if `epoch` is smaller.

    An `epoch` larger than `total` begins again within the epoch, to fill its last batch.
    """
    return lambda position: position % epoch % total


def shuffled(total: int, epoch: int, seed: int) -> Order:
    """Every epoch in another order, the same on every rank and in every layout.

    An epoch takes `epoch` of the `total` samples, each at most once; positions beyond all of them are index -1.
    """
    order_of = _permutations(total, seed)

    def order(position: int) -> int:
        number, place = divmod(position, epoch)
        return int(order_of(number)[place]) if place < total else FILLER

    return order


def sharded(total: int, seed: int, share: Share) -> Order:
    """Every epoch in another order; each data-parallel rank keeps to its own part of the samples.

    The content of a global batch depends on the data-parallel and the micro-batch size. Samples beyond a multiple of
    the data-parallel size are never read.
    """
    part = total // share.replicas
    orders = [_permutations(part, seed, rank) for rank in range(share.replicas)]

    def order(position: int) -> int:
        turn, place = divmod(position, share.step)
        rank, row = divmod(place, share.micro_batch_size)
        epoch, place = divmod(turn * share.micro_batch_size + row, part)
        return rank * part + int(orders[rank](epoch)[place])

    return order


def _permutations(total: int, *seed: int) -> Callable[[int], np.ndarray]:
    """Return the shuffled orders by epoch; two are kept, as one batch may end an epoch and begin the next."""

    @lru_cache(maxsize=2)
    def order_of(epoch: int) -> np.ndarray:
        return np.random.default_rng((*seed, epoch)).permutation(total)

    return order_of


def epoch_length(total: int, batch: int, drop_last: bool) -> int:
    """Return the samples of one pass: whole global batches under `drop_last`, if there is one, else all of them.

    Without `drop_last` a batch may hold the end of one epoch and the beginning of the next.
    """
    return total - total % batch if drop_last and total >= batch else total


def micro_batches(order: Order, share: Share, consumed: int) -> Iterator[Request]:
    """Yield one micro-batch after the other, without end; a batch-size ramp just takes more of them per step."""
    for first in itertools.count(consumed, share.step):
        own = [order(position) for position in share.rows(first)]
        yield own, own


def global_batches(order: Order, share: Share, consumed: int, size_at: Callable[[int], int]) -> Iterator[Request]:
    """Yield one global batch after the other, without end: all micro-batches of this rank, one below the other.

    size_at: samples consumed -> size of the next global batch, a multiple of `share.step`.
    """
    while True:
        size = size_at(consumed)
        whole = [order(position) for position in range(consumed, consumed + size)]
        starts = range(consumed, consumed + size, share.step)
        yield [whole[position - consumed] for start in starts for position in share.rows(start)], whole
        consumed += size


def batches(
    dataset: Any,
    requests: Iterable[Request],
    collate: Collate,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    persistent_workers: bool = False,
    seed: int = 0,
    surviving_signal: int | None = None,
) -> Iterator[Batch]:
    """Yield the requested batches. Workers start with the first batch.

    The loader draws from its own generator: the model's random numbers stay the same in a run that resumes.
    surviving_signal: must not end a worker before the main process.
    """
    loader = DataLoader(
        _Fetch(dataset, collate),
        sampler=requests,
        batch_size=None,
        collate_fn=lambda batch: batch,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers and num_workers > 0,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=lambda _: _survive(surviving_signal),
        multiprocessing_context="fork" if num_workers else None,
    )
    with _blocked(surviving_signal):  # it may come before a worker can ignore it
        iterator = iter(loader)
    yield from iterator


class _Fetch(Dataset[Batch]):
    """A dataset whose index is a whole request."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, request: Request) -> Batch:
        own, whole = request
        return self._collate([self._dataset[index] for index in own], whole)


@contextlib.contextmanager
def _blocked(number: int | None) -> Iterator[None]:
    """Keep a signal waiting, here and in the processes that are forked."""
    if number is None:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _survive(number: int | None) -> None:
    """Ignore a signal, unless the parent sends it: a scheduler signals every process of a job, workers too.

    torch ends a worker it no longer needs by SIGTERM, so that the signal cannot simply be ignored.
    """
    if number is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    parent = os.getppid()

    def leave_when_told() -> None:
        while signal.sigwaitinfo([number]).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=leave_when_told, daemon=True).start()


def stack(rows: Rows, whole: list[int]) -> Batch:
    """Stack samples of one length: every tensor that they hold, [rows, ...]."""
    names = [name for name, value in rows[0].items() if isinstance(value, torch.Tensor)]
    return {name: torch.stack([row[name] for row in rows]) for name in names}


def pad(rows: Rows, whole: list[int], *, lengths: np.ndarray | None, limit: int, unit: int, pad_id: int) -> Batch:
    """Pad samples of different lengths, all in tokens, [rows, length]; padding has no loss.

    lengths: of every sample of the dataset; None pads to `limit`. With them, the length is that of the longest sample
    of the whole global batch, rounded up, so that all ranks agree on it.
    """
    length = limit
    if lengths is not None:
        unit = math.lcm(_UNIT, unit)
        length = min(-(-int(lengths[whole].max()) // unit) * unit, limit)

    def filled(name: str, filler: int) -> torch.Tensor:
        values = np.full((len(rows), length), filler, dtype=np.int64)
        for value, row in zip(values, rows, strict=True):
            value[: len(row[name])] = row[name]
        return torch.from_numpy(values)

    return {
        "tokens": filled("tokens", pad_id),
        "labels": filled("labels", pad_id),
        "loss_mask": filled("loss_mask", 0).float(),
        "position_ids": torch.arange(length).repeat(len(rows), 1),
    }


def stack_packed(rows: Rows, whole: list[int], *, boundaries: int | None = None, longest: int | None = None) -> Batch:
    """Stack packed sequences, [rows, packed size], and their boundaries, int32 [rows, boundaries].

    boundaries: pad each row's boundaries to that many with its last one, as CUDA graphs need; None: to the longest row.
    After them comes at least one -1, the first at `cu_seqlens_argmin` [rows, 1]. `max_seqlen` [rows, 1] is in tokens;
    longest: report this instead of each row's own.
    """
    bounds = [row["cu_seqlens"] for row in rows]
    if boundaries is not None:
        bounds = [np.pad(each, (0, boundaries - len(each)), mode="edge") for each in bounds]
    padded = np.full((len(rows), max(map(len, bounds)) + 1), -1, dtype=np.int32)
    for row, each in zip(padded, bounds, strict=True):
        row[: len(each)] = each
    lengths = [longest or int(np.diff(each).max()) for each in bounds]
    return {
        **stack(rows, whole),
        "cu_seqlens": torch.from_numpy(padded),
        "cu_seqlens_argmin": torch.tensor([[len(each)] for each in bounds], dtype=torch.int32),
        "max_seqlen": torch.tensor([[each] for each in lengths], dtype=torch.int32),
    }
