"""Synthetic samples cost nothing, and are the same for everyone who asks with the same seed."""

import time
from itertools import islice

import pytest
import torch

from cloudai_mbridge.training.config.dataset import DatasetBuildContext, SyntheticGPTDatasetConfig
from cloudai_mbridge.training.data.iterators import SyntheticDataset, pooled_micro_batches
from cloudai_mbridge.training.data.loader import Share
from tests.cases import every
from tests.golden import Sentence

DATASET = SyntheticDataset(1000, 16, 100, seed=3, pool_samples=6)


def read(mbs: int, dp: int, samples: int, consumed: int = 0) -> torch.Tensor:
    """Return the tokens of the run's samples, in global order, put together from all ranks."""
    turns = samples // (mbs * dp)
    ranks = [
        [b["tokens"] for b in islice(pooled_micro_batches(DATASET, Share(mbs, rank, dp), consumed, False), turns)]
        for rank in range(dp)
    ]
    return torch.cat([rank[turn] for turn in range(turns) for rank in ranks])


@every(("mbs", "dp"), [(1, 1), (1, 2), (2, 1), (2, 3), (4, 1), (4, 3), (8, 1)])
def test_every_layout_and_every_resumption_reads_the_same(mbs: int, dp: int) -> None:
    expected = torch.stack([DATASET[i]["tokens"] for i in range(48)])
    assert torch.equal(read(mbs, dp, 48), expected)
    assert torch.equal(read(mbs, dp, 24, consumed=24), expected[24:])


def test_samples_are_next_token_pairs_below_the_vocabulary_size() -> None:
    sample = DATASET[4]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["tokens"].shape == sample["position_ids"].shape == sample["loss_mask"].shape == (16,)
    everything = torch.stack([DATASET[i]["tokens"] for i in range(6)])
    assert everything.min() >= 0
    assert everything.max() < 100
    assert len(everything.unique(dim=0)) == 6


def test_the_seed_decides() -> None:
    again, other = SyntheticDataset(1, 16, 100, 3, 6), SyntheticDataset(1, 16, 100, 4, 6)
    assert torch.equal(again[2]["tokens"], DATASET[2]["tokens"])
    assert not torch.equal(other[2]["tokens"], DATASET[2]["tokens"])


def test_a_micro_batch_is_handed_out_and_not_made() -> None:
    large = SyntheticDataset(10, 8192, 32000, 1, 64)
    iterator = pooled_micro_batches(large, Share(1, 0, 1), 0, False)
    first = list(islice(iterator, 64))
    start = time.perf_counter()
    second = list(islice(iterator, 64 * 200))
    seconds_each = (time.perf_counter() - start) / len(second)
    assert all(second[i] is first[i % 64] for i in range(len(second)))
    assert seconds_each < 20e-6


def test_the_configuration_builds_the_splits_that_are_drawn_from() -> None:
    config = SyntheticGPTDatasetConfig(seq_length=8, vocab_size=50, pool_samples=4, num_workers=0)
    config.finalize()
    train, valid, test = config.build_datasets(DatasetBuildContext(10, 5, 0))
    assert train is not None
    assert valid is not None
    assert (len(train), len(valid), test) == (10, 5, None)
    assert not torch.equal(train[0]["tokens"], valid[0]["tokens"])
    assert config.persistent_workers is False


@every("name", ["seq_length", "vocab_size", "pool_samples"])
def test_a_size_is_at_least_one(sentence: Sentence, name: str) -> None:
    with pytest.raises(ValueError, match=f"dataset.{name}") as caught:
        SyntheticGPTDatasetConfig(**{"seq_length": 8, name: 0}).finalize()
    sentence(caught)
