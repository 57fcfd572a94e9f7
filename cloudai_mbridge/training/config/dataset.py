"""Data loaders, and the GPT pretraining datasets that feed them."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig as MCoreGPTDatasetConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import MegatronTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class DataloaderConfig:
    """Options of drawing batches from a dataset for the training loop."""

    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = None
    num_workers: int = 2
    data_sharding: bool = True
    pin_memory: bool = True
    drop_last: bool = True
    persistent_workers: bool = True
    trust_remote_code: bool | None = None

    def finalize(self) -> None:
        """Turn persistent workers off without workers."""
        if self.num_workers == 0:
            self.persistent_workers = False


@dataclass(frozen=True)
class DatasetBuildContext:
    """Input of a dataset's build: samples per split, and objects of the run that the builder may need."""

    train_samples: int
    valid_samples: int
    test_samples: int
    tokenizer: MegatronTokenizerBase | None = None
    pg_collection: ProcessGroupCollection | None = None


@dataclass
class DatasetProvider(DataloaderConfig, ABC):
    """A dataset configuration that builds its own datasets."""

    @abstractmethod
    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, Any | None]:
        """Build the train, validation and test datasets; None for a missing split."""


@dataclass(init=False)
class GPTDatasetConfig(MCoreGPTDatasetConfig, DataloaderConfig):  # type: ignore[misc]
    """Megatron-Core's GPT dataset and its data loader."""

    data_path: str | list[str] | None = None
    skip_getting_attention_mask_from_dataset: bool = True

    def __init__(
        self,
        seq_length: int | None = None,
        skip_getting_attention_mask_from_dataset: bool = True,
        data_path: str | list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Take `seq_length` (or Megatron-Core's `sequence_length`) in tokens, and the fields of dataset and loader.

        ValueError: neither length is given; `seq_length` wins over the other.
        TypeError: a missing `random_seed`, or an unknown field.
        """
        sequence_length = kwargs.pop("sequence_length", None)
        if seq_length is None and sequence_length is None:
            raise ValueError("seq_length (or sequence_length) is needed: the tokens of one sample")
        loader = {f.name: kwargs.pop(f.name) for f in fields(DataloaderConfig) if f.name in kwargs}
        kwargs["sequence_length"] = sequence_length if seq_length is None else seq_length
        MCoreGPTDatasetConfig.__init__(self, *args, **kwargs)
        DataloaderConfig.__init__(self, **loader)
        self.skip_getting_attention_mask_from_dataset = skip_getting_attention_mask_from_dataset
        self.data_path = data_path
        self._derived_blend: Blend | None = None

    def __post_init__(self) -> None:
        """Leave the checks to `finalize`: fields may change until then."""

    @property
    def seq_length(self) -> int:
        """Stand for `sequence_length`, under the name that models use."""
        return int(self.sequence_length)

    @seq_length.setter
    def seq_length(self, value: int) -> None:
        self.sequence_length = value

    def finalize(self) -> None:
        """Derive blend, split and mock, and apply the rules of Megatron-Core's blended datasets and of the loader.

        Megatron-Core's own GPT rules need a tokenizer, which is built later.

        AssertionError: a rule is broken, or one of the three options of the masks is not given.
        """
        if self.data_path is not None:
            derived = blend_from_data_path(self.data_path)
            if self.blend is None or self.blend is self._derived_blend:  # type: ignore[has-type]
                self.blend = self._derived_blend = derived
            elif list(self.blend) != list(derived):
                # Legal, and easily meant otherwise: a saved configuration holds the blend of its old data_path
                logger.warning("data_path=%r is not read: blend=%r is given as well", self.data_path, self.blend)
        for name in ("fast_cache_load", "defer_npy_index_mmap"):
            assert not getattr(self, name) or self.path_to_cache is not None, (
                f"dataset.{name} = True needs dataset.path_to_cache, a directory with the indices of these samples"
            )
        self.mock, self.split_matrix = False, None  # as an earlier call may have left them
        BlendedMegatronDatasetConfig.__post_init__(self)
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            assert getattr(self, name) is not None, f"{name} is needed: True or False"
        DataloaderConfig.finalize(self)


@dataclass(init=False)
class MockGPTDatasetConfig(GPTDatasetConfig):
    """GPT samples that are made up: no files, no blend."""

    def __init__(self, seq_length: int | None = None, **kwargs: Any) -> None:
        """Take the arguments of GPTDatasetConfig, by name."""
        super().__init__(seq_length=seq_length, **kwargs)

    def finalize(self) -> None:
        """Refuse every source of real data with a TypeError, then apply the rules of GPTDatasetConfig."""
        if given := [name for name in ("blend", "blend_per_split", "data_path") if getattr(self, name)]:
            raise TypeError(f"MockGPTDatasetConfig makes its samples up and takes no {' and no '.join(given)}")
        self.__dict__.pop("blend", None)
        self.__dict__.pop("blend_per_split", None)
        super().finalize()


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
        """Return the number of requested samples, at least one."""
        return max(1, self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample, [seq_length] each."""
        ids = self._ids[index % self.pool_samples]
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": self._loss_mask, "position_ids": self._position_ids}


@dataclass(kw_only=True)
class SyntheticGPTDatasetConfig(DatasetProvider):
    """Random GPT samples from memory, `seq_length` tokens each: reading them takes no time."""

    seq_length: int
    vocab_size: int | None = None  # ids are below it; None: the tokenizer's
    seed: int = 1234
    pool_samples: int = 64  # different samples per split

    def finalize(self) -> None:
        """Apply the rules of the loader. Raises ValueError: a size that is not positive."""
        for name in ("seq_length", "vocab_size", "pool_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"dataset.{name} = {value}: use at least 1")
        super().finalize()

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any | None, Any | None, Any | None]:
        """Draw a pool per split; None for a split that nothing is drawn from."""
        vocab_size = self.vocab_size
        if vocab_size is None:
            assert context.tokenizer is not None, "vocab_size is needed without a tokenizer"
            vocab_size = int(context.tokenizer.vocab_size)
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (
            SyntheticDataset(count, self.seq_length, vocab_size, self.seed + split, self.pool_samples)
            if count
            else None
            for split, count in enumerate(counts)
        )
        return train, valid, test


Blend = tuple[list[str], list[float] | None]


def blend_from_data_path(data_path: str | Sequence[str | float]) -> Blend:
    """Turn paths, or weights and paths in turn, into (prefixes, weights); weights are None if not given.

    A string is split at white space. An odd number of items, or an even one in which no odd position (the first, the
    third, ...) holds a finite number, is a list of paths.

    AssertionError: no path, only some positions for weights hold numbers, a negative weight, or all weights zero.
    """
    items = data_path.split() if isinstance(data_path, str) else list(data_path)
    assert items, "data_path is given and names no dataset: leave it out for mock data"
    weights = [] if len(items) % 2 else [_weight(item) for item in items[::2]]
    if all(weight is None for weight in weights):
        return _prefixes(items), None
    missing = [item for item, weight in zip(items[::2], weights, strict=True) if weight is None]
    assert not missing, (
        f"data_path mixes weights and paths: {missing!r} stand in the places of weights; write a weight before "
        "every path or before none"
    )
    given = [weight for weight in weights if weight is not None]
    assert min(given) >= 0 < max(given), f"data_path weights {given} must not be negative, nor all zero"
    return _prefixes(items[1::2]), given


def _weight(item: str | float) -> float | None:
    try:
        weight = float(item)
    except ValueError:
        return None
    return weight if math.isfinite(weight) else None


def _prefixes(items: Sequence[str | float]) -> list[str]:
    return [str(item).strip() for item in items]
