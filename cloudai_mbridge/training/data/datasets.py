"""Build the datasets that the configuration asks for."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.dataset import DatasetBuildContext, GPTDatasetConfig
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.data.finetuning import build_finetuning_datasets
from cloudai_mbridge.training.data.gpt import Datasets, build_gpt_datasets
from cloudai_mbridge.training.data.sizes import SplitSizes


def build_datasets(config: ConfigContainer, tokenizer: Any, sizes: SplitSizes) -> Datasets:
    """Build the train, validation and test datasets; None for a split that is not there or not asked for.

    Every rank calls it.
    """
    dataset: Any = config.dataset
    if isinstance(dataset, GPTDatasetConfig):
        return build_gpt_datasets(dataset, tokenizer, sizes)
    if isinstance(dataset, FinetuningDatasetConfig):
        return build_finetuning_datasets(config, tokenizer, sizes)
    context = DatasetBuildContext(
        train_samples=sizes.train,
        valid_samples=sizes.valid or 0,
        test_samples=sizes.test,
        tokenizer=tokenizer,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    train, valid, test = dataset.build_datasets(context)
    return train, valid, test
