"""The run's data iterators: one per model chunk, at the position of the counters."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import RerunDataIterator

from cloudai_mbridge.training.compat.batches import batch_size_calculator
from cloudai_mbridge.training.config.container import ConfigContainer, required
from cloudai_mbridge.training.config.dataset import SyntheticDataset
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.data.collate import stack
from cloudai_mbridge.training.data.datasets import build_datasets, check_data_config, split_sizes
from cloudai_mbridge.training.data.finetuning import collate_for, is_packed
from cloudai_mbridge.training.data.gpt import Datasets, reads_samples
from cloudai_mbridge.training.data.loader import LoaderOptions, batches
from cloudai_mbridge.training.data.samplers import (
    GlobalBatches,
    InOrder,
    MicroBatches,
    Order,
    Sharded,
    Share,
    Shuffled,
    epoch_length,
)
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer

Chunks = Any  # RerunDataIterator, or with virtual stages a list of them, or None


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
        evaluations = _full_pass(config, valid)
    has_data = [train is not None and (config.train.train_iters or 0) > 0, valid is not None, test is not None]
    seen = torch.tensor([*has_data, evaluations], dtype=torch.int64, device=current_device())
    dist.broadcast(seen, src=0)
    has_train, has_valid, has_test, evaluations = seen.tolist()
    progress.do_train = bool(has_train)
    progress.do_valid = bool(has_valid and evaluations)
    progress.do_test = bool(has_test and evaluations)
    if validation.full_validation:
        validation.eval_iters = evaluations


def _full_pass(config: ConfigContainer, dataset: Any) -> int:
    """Return the global batches of one pass over a dataset; a partial last batch counts unless dropped.

    Raises ConfigError: the length is missing, or less than one whole batch.
    """
    if not hasattr(dataset, "__len__"):
        raise ConfigError("validation.full_validation = True needs a validation set with a length; set it to False")
    loader: Any = config.dataset
    batch = config.eval_batch_sizes[0]
    batches_of_pass = len(dataset) // batch if loader.drop_last else -(-len(dataset) // batch)
    if batches_of_pass == 0:
        raise ConfigError(
            f"validation.full_validation: {len(dataset)} samples are less than one batch of {batch}; use"
            " dataset.drop_last=False, which fills it up"
        )
    return batches_of_pass


def _per_chunk(config: ConfigContainer, dataset: Any, split: str, consumed: int, model_chunks: int) -> Chunks:
    loader: Any = config.dataset
    if dataset is None or not (reads_samples(loader) or is_packed(loader)):
        iterators: list[Any] = [None] * model_chunks
    elif loader.dataloader_type == "external":
        iterators = [RerunDataIterator(each) for each in _external(dataset, split, model_chunks)]
    else:
        make = _maker(config, dataset, split, consumed)
        iterators = [RerunDataIterator(make()) for _ in range(model_chunks)]
    return iterators if model_chunks > 1 else iterators[0]


def _external(dataset: Any, split: str, model_chunks: int) -> list[Iterator[Any]]:
    """Iterate over the user's own batches, as they are; evaluation begins again at the end if possible."""
    if iter(dataset) is dataset:
        return list(itertools.tee(dataset, model_chunks)) if model_chunks > 1 else [dataset]
    if split == "train":
        return [iter(dataset) for _ in range(model_chunks)]
    return [itertools.chain.from_iterable(itertools.repeat(dataset)) for _ in range(model_chunks)]


def _maker(config: ConfigContainer, dataset: Any, split: str, consumed: int) -> Callable[[], Iterator[Any]]:
    """Return a factory of iterators over `dataset`, from the sample after `consumed`."""
    loader: Any = config.dataset
    replicas = mpu.get_data_parallel_world_size()
    micro = required(config.train.micro_batch_size) if split == "train" else config.eval_batch_sizes[1]
    share = Share(micro, mpu.get_data_parallel_rank(), replicas)
    options = _options(config)
    kind = loader.dataloader_type or "single"
    if isinstance(dataset, SyntheticDataset) and kind == "single":
        return lambda: pooled_micro_batches(dataset, share, consumed, options.pin_memory)
    order = _order(config, dataset, split, share)
    sampler: Any = MicroBatches(order, share, consumed)
    if kind == "batch":
        sampler = GlobalBatches(order, share, consumed, _batch_size_at(config, split, share))
    collate = collate_for(config, dataset)
    return lambda: batches(dataset, sampler, collate, options)


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
        return Sharded(total, _seed(config), share)
    shuffles = loader.dataloader_type == "cyclic" or (
        loader.dataloader_type == "batch" and isinstance(loader, FinetuningDatasetConfig)
    )
    if split == "train" and shuffles:
        return Shuffled(total, epoch, _seed(config))
    return InOrder(total, epoch)


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


def _options(config: ConfigContainer) -> LoaderOptions:
    loader: Any = config.dataset
    train = config.train
    survives = train.exit_signal_handler or train.exit_signal_handler_for_dataloader
    return LoaderOptions(
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory and current_device().type != "cpu",
        persistent_workers=loader.persistent_workers,
        seed=config.rng.seed + mpu.get_data_parallel_rank(),
        surviving_signal=int(train.exit_signal) if survives else None,
    )


def _seed(config: ConfigContainer) -> int:
    dataset: Any = config.dataset
    return int(getattr(dataset, "seed", getattr(dataset, "random_seed", config.rng.seed)))


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
