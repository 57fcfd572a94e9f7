"""Selection of the samples of a batch: pure functions of the samples that the run has consumed (its position).

An order turns a position into an index of the dataset, a sampler yields the positions a data-parallel rank reads next.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Order = Callable[[int], int]  # position in the run -> index of the dataset, or FILLER
FILLER = -1  # a sample without loss, as long as the last one


@dataclass(frozen=True)
class InOrder:
    """One sample after the other, over and over; only the first `epoch` of `total` samples if `epoch` is smaller.

    An `epoch` larger than `total` begins again within the epoch, to fill its last batch.
    """

    total: int
    epoch: int

    def __call__(self, position: int) -> int:
        return position % self.epoch % self.total


class Shuffled:
    """Every epoch in another order, the same on every rank and in every layout.

    An epoch takes `epoch` of the `total` samples, each at most once; positions beyond all of them are index -1.
    """

    def __init__(self, total: int, epoch: int, seed: int) -> None:
        self.total, self.epoch = total, epoch
        self._order_of = _permutations(total, seed)

    def __call__(self, position: int) -> int:
        epoch, place = divmod(position, self.epoch)
        return int(self._order_of(epoch)[place]) if place < self.total else FILLER


class Sharded:
    """Every epoch in another order; each data-parallel rank keeps to its own part of the samples.

    The content of a global batch depends on the data-parallel and the micro-batch size. Samples beyond a multiple of
    the data-parallel size are never read.
    """

    def __init__(self, total: int, seed: int, share: "Share") -> None:
        self.share = share
        self.part = total // share.replicas
        self._orders = [_permutations(self.part, seed, rank) for rank in range(share.replicas)]

    def __call__(self, position: int) -> int:
        turn, place = divmod(position, self.share.step)
        rank, row = divmod(place, self.share.micro_batch_size)
        epoch, place = divmod(turn * self.share.micro_batch_size + row, self.part)
        return rank * self.part + int(self._orders[rank](epoch)[place])


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


@dataclass(frozen=True)
class Share:
    """Which part of every global batch a data-parallel rank reads; all sizes in samples.

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


class BatchIndices(NamedTuple):
    """The samples that this rank reads at once, and the samples that all ranks together read."""

    own: list[int]
    whole: list[int]


@dataclass(frozen=True)
class MicroBatches:
    """One micro-batch after the other, without end; a batch-size ramp just takes more of them per step."""

    order: Order
    share: Share
    consumed: int

    def __iter__(self) -> Iterator[BatchIndices]:
        for first in itertools.count(self.consumed, self.share.step):
            own = [self.order(position) for position in self.share.rows(first)]
            yield BatchIndices(own, own)


@dataclass(frozen=True)
class GlobalBatches:
    """One global batch after the other, without end: all micro-batches of this rank, one below the other.

    size_at: samples consumed -> size of the next global batch, a multiple of `share.step`.
    """

    order: Order
    share: Share
    consumed: int
    size_at: Callable[[int], int]

    def __iter__(self) -> Iterator[BatchIndices]:
        first = self.consumed
        while True:
            size = self.size_at(first)
            whole = [self.order(position) for position in range(first, first + size)]
            own = [
                whole[position - first]
                for start in range(first, first + size, self.share.step)
                for position in self.share.rows(start)
            ]
            yield BatchIndices(own, whole)
            first += size
