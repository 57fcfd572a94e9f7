"""Micro-batches of Megatron-Core's mock GPT data."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.utils import get_batch_on_this_cp_rank

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.device import current_device
from cloudai_mbridge.training.utils.required import required

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def build_dataset(config: ConfigContainer) -> Any:
    """Build enough samples for the whole run; sample i is the same on every rank and layout."""
    dataset: Any = config.dataset
    dataset.tokenizer = _build_tokenizer(config)
    kind = MockGPTDataset if dataset.mock else GPTDataset
    samples = required(config.train.global_batch_size) * (config.train.train_iters or 0)
    return BlendedMegatronDatasetBuilder(kind, [samples, 1, 0], lambda: True, dataset).build()[0]


def _build_tokenizer(config: ConfigContainer) -> Any:
    """Build the tokenizer; the null one has one id more than its vocabulary, the end of a document.

    Raises:
        NotImplementedError: this version builds only the null tokenizer.
    """
    if config.tokenizer.tokenizer_type not in (None, "NullTokenizer"):
        raise NotImplementedError(f"tokenizer.tokenizer_type: {config.tokenizer.tokenizer_type!r} is not built yet")
    model: Any = config.model
    size = config.tokenizer.vocab_size or model.vocab_size - 1
    return MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=size)


def micro_batches(config: ConfigContainer, dataset: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this data-parallel rank's micro-batches for ever: tensors [micro_batch_size, seq_length / cp].

    The samples of one global batch are the same under every layout; only who takes which differs.
    """
    size = required(config.train.micro_batch_size)
    rank, world = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    device = current_device()
    first = 0
    while True:
        rows = [dataset[i % len(dataset)] for i in range(first + rank * size, first + (rank + 1) * size)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in _KEYS}
        yield {key: value.to(device) for key, value in get_batch_on_this_cp_rank(batch).items()}
        first += size * world
