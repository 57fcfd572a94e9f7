"""Check the data section before anything starts, and build its datasets."""

from typing import Any, NamedTuple

from megatron.core.process_groups_config import ProcessGroupCollection

from cloudai_mbridge.training.config.container import ConfigContainer, required
from cloudai_mbridge.training.config.dataset import DatasetBuildContext, DatasetProvider, GPTDatasetConfig
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, GPTFIMDatasetConfig
from cloudai_mbridge.training.config.rules.scheduler_steps import calculate_scheduler_steps
from cloudai_mbridge.training.data.fim import check_fim
from cloudai_mbridge.training.data.finetuning import build_finetuning_datasets, check_finetuning
from cloudai_mbridge.training.data.gpt import Datasets, build_gpt_datasets, check_blend_files
from cloudai_mbridge.training.errors import ConfigError


def check_data_config(config: ConfigContainer) -> None:
    """Make all checks that need no building; every rank may call it, at any time after validation.

    Raises ConfigError: key, value, remedy.
    """
    dataset: Any = config.dataset
    for name, section in (("validation", config.validation), ("dataset", dataset)):
        if getattr(section, "multiple_validation_sets", None):
            several = f"{name}.multiple_validation_sets = True"
            raise ConfigError(f"{several}: Megatron-Bridge 0.6 loads one validation set; use one blend per split")
    if dataset.num_workers < 0:
        raise ConfigError(f"dataset.num_workers = {dataset.num_workers}: use 0 (no workers) or more")
    if dataset.dataloader_type == "external" and not isinstance(dataset, DatasetProvider):
        raise ConfigError(
            f"dataset.dataloader_type = 'external' needs a DatasetProvider that returns batches, and dataset is a"
            f" {type(dataset).__name__}; use 'single', 'cyclic' or 'batch'"
        )
    length = getattr(dataset, "seq_length", None)
    if length is not None and length != config.model.seq_length:
        raise ConfigError(f"dataset.seq_length = {length}, model.seq_length = {config.model.seq_length}: use the same")
    if isinstance(dataset, GPTDatasetConfig):
        check_blend_files(dataset)
        if isinstance(dataset, GPTFIMDatasetConfig):
            check_fim(dataset)
        blend = dataset.blend_per_split[1] if dataset.blend_per_split is not None else dataset.blend
        # weights set how often each file is drawn from: not possible if all samples are read once
        if config.validation.full_validation and blend is not None and blend[1] is not None:
            raise ConfigError(
                "validation.full_validation = True: the validation data have weights; leave the weights out"
            )
    elif isinstance(dataset, FinetuningDatasetConfig):
        check_finetuning(config)


class SplitSizes(NamedTuple):
    """Samples that the run draws from each split; None: all of them, once."""

    train: int
    valid: int | None
    test: int


def split_sizes(config: ConfigContainer) -> SplitSizes:
    """Return the samples of the whole run, evaluations at every `eval_interval` and at the end included."""
    train, validation = config.train, config.validation
    batch, iters = required(train.global_batch_size), train.train_iters or 0
    train_samples = iters * batch if train.train_samples is None else train.train_samples
    test_samples = (validation.eval_iters or 0) * config.eval_batch_sizes[0]
    evaluations = iters // validation.eval_interval + 1 if validation.eval_interval else 1
    return SplitSizes(train_samples, None if validation.full_validation else evaluations * test_samples, test_samples)


def build_for_epochs(config: ConfigContainer, tokenizer: Any) -> Datasets:
    """Build the datasets of a run of `train.num_epochs`, and derive its `train_iters` and schedule.

    Every rank calls it. Raises ConfigError: as of `build_datasets`, or `train_iters` is given as well and differs.
    """
    train, valid, test = build_datasets(config, tokenizer, split_sizes(config)._replace(train=1))
    assert train is not None, "fine-tuning data have a training set"
    try:
        config.train.resolve_epochs(len(train))
        calculate_scheduler_steps(config)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"train: {error}") from error
    return train, valid, test


def build_datasets(config: ConfigContainer, tokenizer: Any, sizes: SplitSizes) -> Datasets:
    """Build the train, validation and test datasets on every rank; None for a missing or unrequested split."""
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
