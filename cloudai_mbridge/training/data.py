"""Micro-batches of Megatron-Core's mock GPT data."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers import MegatronTokenizer
from megatron.core.utils import get_batch_on_this_cp_rank

from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.device import current_device

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def build_dataset(config: ConfigContainer) -> Any:
    """Build enough mock samples for the whole run; sample i is the same on every rank and layout."""
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null"}, vocab_size=config.model.vocab_size - 1
    )
    dataset_config = GPTDatasetConfig(
        random_seed=config.dataset.random_seed,
        sequence_length=config.model.seq_length,
        blend=None,
        blend_per_split=None,
        split="99,1,0",
        path_to_cache=None,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    samples = config.train.global_batch_size * config.train.train_iters
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, [samples, 1, 0], lambda: True, dataset_config)
    return builder.build()[0]


def micro_batches(config: ConfigContainer, dataset: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this data-parallel rank's micro-batches for ever: tensors [micro_batch_size, seq_length / cp].

    The samples of one global batch are the same under every layout; only who takes which differs.
    """
    size = config.train.micro_batch_size
    rank, world = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    device = current_device()
    first = 0
    while True:
        rows = [dataset[i % len(dataset)] for i in range(first + rank * size, first + (rank + 1) * size)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in _KEYS}
        yield {key: value.to(device) for key, value in get_batch_on_this_cp_rank(batch).items()}
        first += size * world
