"""Random samples from memory: they cost a step nothing, which is what a benchmark wants."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cloudai_mbridge.training.data.collate import stack
from cloudai_mbridge.training.data.samplers import Share


class SyntheticDataset:
    """A pool of random samples, drawn once from the seed; sample i is number i modulo the pool's size."""

    def __init__(self, samples: int, seq_length: int, vocab_size: int, seed: int, pool_samples: int) -> None:
        """Draw the pool: ids below `vocab_size`, `seq_length` tokens per sample."""
        self._samples, self.pool_samples = samples, pool_samples
        drawn = np.random.default_rng(seed).integers(vocab_size, size=(pool_samples, seq_length + 1), dtype=np.int64)
        self._ids = torch.from_numpy(drawn)
        self._loss_mask = torch.ones(seq_length)
        self._position_ids = torch.arange(seq_length)

    def __len__(self) -> int:
        """Return the samples that were asked for, at least one."""
        return max(1, self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample, [seq_length] each."""
        ids = self._ids[index % self.pool_samples]
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": self._loss_mask,
            "position_ids": self._position_ids,
        }


def pooled_micro_batches(
    dataset: SyntheticDataset, share: Share, consumed: int, pin_memory: bool
) -> Iterator[dict[str, Any]]:
    """Return this rank's micro-batches for ever, built once and handed out as they are; nobody may write to them."""
    size = dataset.pool_samples
    period = size // np.gcd(size, share.step)
    firsts = [(consumed + turn * share.step) % size for turn in range(int(period))]
    pool = [stack([dataset[index] for index in share.rows(first)], []) for first in firsts]
    if pin_memory:
        pool = [{name: value.pin_memory() for name, value in batch.items()} for batch in pool]
    return itertools.cycle(pool)
