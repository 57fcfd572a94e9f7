"""The data of a run: checks, datasets, and iterators, one per model chunk, at the position of the counters."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator

from cloudai_mbridge.training.compat.batches import batch_size_calculator
from cloudai_mbridge.training.config.container import ConfigContainer, required
from cloudai_mbridge.training.config.dataset import (
    DatasetBuildContext,
    DatasetProvider,
    GPTDatasetConfig,
    SyntheticDataset,
)
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, GPTFIMDatasetConfig
from cloudai_mbridge.training.config.rules.scheduler_steps import calculate_scheduler_steps
from cloudai_mbridge.training.data.finetuning import build_finetuning_datasets, check_finetuning, collate_for, is_packed
from cloudai_mbridge.training.data.gpt import Datasets, build_gpt_datasets, check_blend_files, check_fim, reads_samples
from cloudai_mbridge.training.data.loader import (
    Order,
    Share,
    batches,
    epoch_length,
    global_batches,
    in_order,
    micro_batches,
    sharded,
    shuffled,
    stack,
)
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer

# Samples that the run draws from the training, validation and test set; None: all of them, once
SplitSizes = tuple[int, int | None, int]
Chunks = Any  # RerunDataIterator, or with virtual stages a list of them, or None


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


def split_sizes(config: ConfigContainer) -> SplitSizes:
    """Return the samples of the whole run, evaluations at every `eval_interval` and at the end included."""
    train, validation = config.train, config.validation
    batch, iters = required(train.global_batch_size), train.train_iters or 0
    train_samples = iters * batch if train.train_samples is None else train.train_samples
    test_samples = (validation.eval_iters or 0) * config.eval_batch_sizes[0]
    evaluations = iters // validation.eval_interval + 1 if validation.eval_interval else 1
    return train_samples, None if validation.full_validation else evaluations * test_samples, test_samples


def build_for_epochs(config: ConfigContainer, tokenizer: Any) -> Datasets:
    """Build the datasets of a run of `train.num_epochs`, and derive its `train_iters` and schedule.

    Every rank calls it. Raises ConfigError: as of `build_datasets`, or `train_iters` is given as well and differs.
    """
    train, valid, test = build_datasets(config, tokenizer, (1, *split_sizes(config)[1:]))
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
        return build_gpt_datasets(dataset, config.model, tokenizer, sizes)
    if isinstance(dataset, FinetuningDatasetConfig):
        return build_finetuning_datasets(config, tokenizer, sizes)
    context = DatasetBuildContext(
        train_samples=sizes[0],
        valid_samples=sizes[1] or 0,
        test_samples=sizes[2],
        tokenizer=tokenizer,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    train, valid, test = dataset.build_datasets(context)
    return train, valid, test


def build_data_iterators(
    state: Any, model_chunks: int, datasets: Datasets | None = None
) -> tuple[Chunks, Chunks, Chunks]:
    """Build the iterators of training, validation and test, and set `do_train`, `do_valid`, `do_test`.

    Every rank calls it, after the checkpoint is loaded: the counters of `state.train_state` set the position.
    An iterator yields, without end, dicts of CPU tensors of one micro-batch, [micro_batch_size, seq_length] each; with
    dataloader_type "batch" all micro-batches of a global batch that are this rank's. With virtual stages there is a
    list of independent iterators over the same data. Stages that read nothing get None, or a list of None.

    With `full_validation`, `validation.eval_iters` becomes the number of batches of one pass. datasets: built by
    `build_for_epochs`.

    Raises ConfigError: the data section, or a file of it, is invalid.
    """
    config, progress = state.cfg, state.train_state
    check_data_config(config)
    if state.tokenizer is None:
        state.tokenizer = build_tokenizer(config)
    train, valid, test = datasets or build_datasets(config, state.tokenizer, split_sizes(config))
    _set_phases(state, train, valid, test)
    consumed = 0 if config.validation.skip_train else progress.consumed_valid_samples
    splits = (
        (train if progress.do_train else None, "train", progress.consumed_train_samples),
        (valid if progress.do_valid else None, "valid", consumed),
        (test if progress.do_test else None, "test", 0),
    )
    train_chunks, valid_chunks, test_chunks = (
        _per_chunk(config, dataset, split, consumed, model_chunks) for dataset, split, consumed in splits
    )
    return train_chunks, valid_chunks, test_chunks


def _set_phases(state: Any, train: Any, valid: Any, test: Any) -> None:
    """Set the phases, and the length of a full validation, to the values of rank 0: middle stages hold no dataset."""
    config, progress = state.cfg, state.train_state
    validation = config.validation
    evaluations = validation.eval_iters or 0
    if validation.full_validation and valid is not None:
        if not hasattr(valid, "__len__"):
            raise ConfigError("validation.full_validation = True needs a validation set with a length; set it to False")
        batch = config.eval_batch_sizes[0]
        evaluations = len(valid) // batch if config.dataset.drop_last else -(-len(valid) // batch)
        if evaluations == 0:
            raise ConfigError(
                f"validation.full_validation: {len(valid)} samples are less than one batch of {batch}; use"
                " dataset.drop_last=False, which fills it up"
            )
    has_data = [train is not None and (config.train.train_iters or 0) > 0, valid is not None, test is not None]
    seen = torch.tensor([*has_data, evaluations], dtype=torch.int64, device=current_device())
    dist.broadcast(seen, src=0)
    has_train, has_valid, has_test, evaluations = seen.tolist()
    progress.do_train = bool(has_train)
    progress.do_valid = bool(has_valid and evaluations)
    progress.do_test = bool(has_test and evaluations)
    if validation.full_validation:
        validation.eval_iters = evaluations


def _per_chunk(config: ConfigContainer, dataset: Any, split: str, consumed: int, model_chunks: int) -> Chunks:
    loader: Any = config.dataset
    iterators: list[Any]
    if dataset is None or not (reads_samples(loader, config.model) or is_packed(loader)):
        iterators = [None] * model_chunks
    elif loader.dataloader_type != "external":
        iterators = [_batches(config, dataset, split, consumed) for _ in range(model_chunks)]
    # the user's own batches, as they are; evaluation begins again at the end if possible
    elif iter(dataset) is dataset:
        iterators = list(itertools.tee(dataset, model_chunks)) if model_chunks > 1 else [dataset]
    elif split == "train":
        iterators = [iter(dataset) for _ in range(model_chunks)]
    else:
        iterators = [itertools.chain.from_iterable(itertools.repeat(dataset)) for _ in range(model_chunks)]
    iterators = [each if each is None else RerunDataIterator(each) for each in iterators]
    return iterators if model_chunks > 1 else iterators[0]


def _batches(config: ConfigContainer, dataset: Any, split: str, consumed: int) -> Iterator[dict[str, Any]]:
    """Iterate over `dataset`, from the sample after `consumed`."""
    loader: Any = config.dataset
    train = config.train
    micro = required(train.micro_batch_size) if split == "train" else config.eval_batch_sizes[1]
    share = Share(micro, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
    pin_memory = loader.pin_memory and current_device().type != "cpu"
    kind = loader.dataloader_type or "single"
    if isinstance(dataset, SyntheticDataset) and kind == "single":
        return pooled_micro_batches(dataset, share, consumed, pin_memory)
    order = _order(config, dataset, split, share)
    requests = micro_batches(order, share, consumed)
    if kind == "batch":
        requests = global_batches(order, share, consumed, _batch_size_at(config, split, share))
    survives = train.exit_signal_handler or train.exit_signal_handler_for_dataloader
    return batches(
        dataset,
        requests,
        collate_for(config, dataset),
        num_workers=loader.num_workers,
        pin_memory=pin_memory,
        persistent_workers=loader.persistent_workers,
        seed=config.rng.seed + mpu.get_data_parallel_rank(),
        surviving_signal=int(train.exit_signal) if survives else None,
    )


def _order(config: ConfigContainer, dataset: Any, split: str, share: Share) -> Order:
    """Return the order of the samples: as they are, except in training if the loader or fine-tuning shuffles."""
    loader: Any = config.dataset
    total = len(dataset)
    batch = required(config.train.global_batch_size) if split == "train" else config.eval_batch_sizes[0]
    if total == 0:
        raise ConfigError(f"dataset: the {split} set has no samples")
    epoch = epoch_length(total, batch, loader.drop_last)
    if split == "train" and config.train.num_epochs is not None:
        epoch = -(-total // batch) * batch  # a last batch that is not full is filled up
    if split == "valid" and config.validation.full_validation:
        epoch = required(config.validation.eval_iters) * batch
    if split == "train" and loader.dataloader_type == "cyclic" and loader.data_sharding:
        if total < share.replicas:
            raise ConfigError(
                f"dataset.data_sharding = True: {total} samples cannot be divided among {share.replicas} data-parallel"
                " ranks; use False"
            )
        return sharded(total, _seed(config), share)
    shuffles = loader.dataloader_type == "cyclic" or (
        loader.dataloader_type == "batch" and isinstance(loader, FinetuningDatasetConfig)
    )
    if split == "train" and shuffles:
        return shuffled(total, epoch, _seed(config))
    return in_order(total, epoch)


def _seed(config: ConfigContainer) -> int:
    """Return the seed of an order that draws; a dataset of another order may have none."""
    return int(getattr(config.dataset, "seed", getattr(config.dataset, "random_seed", config.rng.seed)))


def _batch_size_at(config: ConfigContainer, split: str, share: Share) -> Callable[[int], int]:
    """Return the size of the next global batch by samples consumed; evaluation has no ramp."""
    if split != "train":
        return lambda consumed: config.eval_batch_sizes[0]
    train = config.train
    calculator = batch_size_calculator(train, train.rampup_batch_size, share.micro_batch_size, share.replicas)

    def size(consumed: int) -> int:
        calculator.update(consumed, False)
        return int(calculator.get() * share.step)

    return size


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
