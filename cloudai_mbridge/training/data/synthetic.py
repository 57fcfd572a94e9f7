"""Micro-batches of random samples from memory: they cost a step nothing, which is what a benchmark wants."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cloudai_mbridge.training.config.dataset import SyntheticDataset
from cloudai_mbridge.training.data.collate import stack
from cloudai_mbridge.training.data.samplers import Share


def pooled_micro_batches(
    dataset: SyntheticDataset, share: Share, consumed: int, pin_memory: bool
) -> Iterator[dict[str, Any]]:
    """Return this rank's endless micro-batches, built once and shared: do not write to them."""
    size = dataset.pool_samples
    period = size // np.gcd(size, share.step)
    firsts = [(consumed + turn * share.step) % size for turn in range(int(period))]
    pool = [stack([dataset[index] for index in share.rows(first)], []) for first in firsts]
    if pin_memory:
        pool = [{name: value.pin_memory() for name, value in batch.items()} for batch in pool]
    return itertools.cycle(pool)
