"""Check the data section before anything starts, and build the datasets that it asks for."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.dataset import DatasetBuildContext, DatasetProvider, GPTDatasetConfig
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, GPTFIMDatasetConfig
from cloudai_mbridge.training.data.finetuning import build_finetuning_datasets, check_finetuning
from cloudai_mbridge.training.data.gpt import Datasets, build_gpt_datasets, check_blend_files
from cloudai_mbridge.training.data.sizes import SplitSizes
from cloudai_mbridge.training.errors import ConfigError


def check_data_config(config: ConfigContainer) -> None:
    """Check what can be checked without building; every rank may call it, at any time after validation.

    Raises:
        ConfigError: key, value, remedy.
    """
    dataset: Any = config.dataset
    if config.validation.multiple_validation_sets or getattr(dataset, "multiple_validation_sets", None):
        raise ConfigError("validation.multiple_validation_sets = True is not done; use one blend per split")
    if isinstance(dataset, GPTFIMDatasetConfig):
        raise ConfigError("dataset = GPTFIMDatasetConfig: fill-in-the-middle is not done; use GPTDatasetConfig")
    if dataset.num_workers < 0:
        raise ConfigError(f"dataset.num_workers = {dataset.num_workers}: use 0 (no workers) or more")
    if dataset.dataloader_type == "external" and not isinstance(dataset, DatasetProvider):
        raise ConfigError(
            f"dataset.dataloader_type = 'external' needs a DatasetProvider that returns batches, and dataset is a"
            f" {type(dataset).__name__}; use 'single', 'cyclic' or 'batch'"
        )
    _check_lengths(config)
    if isinstance(dataset, GPTDatasetConfig):
        check_blend_files(dataset)
        _check_full_validation(config)
    elif isinstance(dataset, FinetuningDatasetConfig):
        check_finetuning(config)


def _check_lengths(config: ConfigContainer) -> None:
    length = getattr(config.dataset, "seq_length", None)
    if length is not None and length != config.model.seq_length:
        raise ConfigError(f"dataset.seq_length = {length}, model.seq_length = {config.model.seq_length}: use the same")


def _check_full_validation(config: ConfigContainer) -> None:
    """Refuse weights where all samples are to be read once: they say how often each file is drawn from."""
    dataset: Any = config.dataset
    blend = dataset.blend_per_split[1] if dataset.blend_per_split is not None else dataset.blend
    if config.validation.full_validation and blend is not None and blend[1] is not None:
        raise ConfigError("validation.full_validation = True: the validation data have weights; leave the weights out")


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
