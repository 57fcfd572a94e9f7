"""Conversion of iterations or samples to the scheduler's own unit, samples: it advances by each step's samples.

Under a batch ramp these are the samples that the ramp consumes; Megatron-Bridge counts iterations x final batch size,
and its schedule ends later than `lr_decay_iters`.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.training.compat.batches import check_ramp, samples_after
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig
from cloudai_mbridge.training.config.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer

_FILLED_IN = "_filled_in"  # attribute, not field: neither compared nor written to files


def check_training_scheduler_compatibility(config: "ConfigContainer") -> None:
    """Raise AssertionError for a schedule in another unit than the training length, or for two warm-ups."""
    used, other = ("samples", "iters") if config.train.train_samples is not None else ("iters", "samples")
    scheduler = config.scheduler
    assert getattr(scheduler, f"lr_decay_{other}") is None, (
        f"train.train_{used} is set: use scheduler.lr_decay_{used}, not lr_decay_{other}"
    )
    assert getattr(scheduler, f"lr_warmup_{other}") == 0, (
        f"train.train_{used} is set: use scheduler.lr_warmup_{used}, not lr_warmup_{other}"
    )
    assert used == "iters" or scheduler.max_steps is None, (
        f"scheduler.max_steps = {scheduler.max_steps} counts iterations, and train.train_samples is set: use"
        " scheduler.lr_decay_samples"
    )
    assert scheduler.lr_warmup_fraction is None or getattr(scheduler, f"lr_warmup_{used}") == 0, (
        f"scheduler: give one of lr_warmup_fraction and lr_warmup_{used}, not both"
    )


def check_epochs(config: "ConfigContainer") -> None:
    """Check that passes over the data can be counted. Raises ValueError: the dataset has no end."""
    dataset: Any = config.dataset
    if config.train.num_epochs is None or (
        isinstance(dataset, FinetuningDatasetConfig) and dataset.dataloader_type == "batch"
    ):
        return
    raise ValueError(
        f"train.num_epochs = {config.train.num_epochs} needs fine-tuning data (GPTSFTDatasetConfig or"
        f" FinetuningDatasetConfig) with dataloader_type='batch', got {type(dataset).__name__} with"
        f" {dataset.dataloader_type!r}; use train.train_iters"
    )


def calculate_scheduler_steps(config: "ConfigContainer") -> None:
    """Set the scheduler's `lr_decay_steps`, `lr_warmup_steps`, `wd_incr_steps` and `wsd_decay_steps`, all in samples.

    Decay lasts as long as training unless given; with `max_steps` it lasts so long, as if training did. The anneal of
    WSD lasts as long as the decay unless given. Both defaults are written into the scheduler's fields.
    `lr_warmup_steps` is a float if it comes from a fraction.

    ValueError: a decay of no steps, no batch size to count samples with, or a ramp that does not lead to it.
    """
    scheduler, train = config.scheduler, config.train
    samples: Callable[[int], int]
    forget_filled_in(scheduler)
    if train.num_epochs is not None and train.train_iters is None:
        return  # until the data have been read
    if train.train_samples is not None:
        unit, length, samples = "samples", train.train_samples, int
    elif train.train_iters is not None and train.global_batch_size is not None:
        replicas = getattr(config, "data_parallel_size", None) or 1
        check_ramp(train, replicas)
        unit, length, samples = "iters", train.train_iters, partial(samples_after, train=train, replicas=replicas)
    else:
        raise ValueError("train.train_iters and train.global_batch_size are needed to count the schedule in samples")
    if unit == "iters" and scheduler.max_steps is not None:
        if scheduler.max_steps < length:
            raise ValueError(f"scheduler.max_steps = {scheduler.max_steps} is less than train.train_iters = {length}")
        length_of_decay = length = scheduler.max_steps
    else:
        length_of_decay = _fill_in(scheduler, f"lr_decay_{unit}", length)
    if scheduler.lr_decay_style == "WSD":
        _fill_in(scheduler, f"lr_wsd_decay_{unit}", length_of_decay)
    decay = samples(length_of_decay)
    anneal = getattr(scheduler, f"lr_wsd_decay_{unit}")
    warmup: Any = samples(getattr(scheduler, f"lr_warmup_{unit}"))
    if scheduler.lr_warmup_fraction is not None:
        warmup = scheduler.lr_warmup_fraction * decay  # not rounded, as the scheduler only divides by it
    scheduler.lr_decay_steps, scheduler.lr_warmup_steps = decay, warmup
    scheduler.wd_incr_steps = samples(length)
    scheduler.wsd_decay_steps = None if anneal is None else decay - samples(length_of_decay - anneal)
    if decay <= 0:
        raise ValueError(f"the learning rate decays over {decay} samples; give a longer training or a longer decay")
    if warmup >= decay:  # Megatron-Core's scheduler refuses it; a short trial of a long run's settings must still run
        warnings.warn(
            f"the warm-up of {warmup} samples does not end before the decay of {decay}; it is cut to {decay - 1}",
            UserWarning,
            stacklevel=2,
        )
        scheduler.lr_warmup_steps = decay - 1


def forget_filled_in(scheduler: SchedulerConfig) -> None:
    """Clear the defaults that an earlier call filled in and that have not changed since.

    Without this a second validation would take them for the user's values, and keep the decay of a training length
    that has changed.
    """
    for name, value in vars(scheduler).pop(_FILLED_IN, {}).items():
        if getattr(scheduler, name) == value:
            setattr(scheduler, name, None)


def _fill_in(scheduler: SchedulerConfig, name: str, default: int) -> int:
    if getattr(scheduler, name) is None:
        setattr(scheduler, name, default)
        vars(scheduler).setdefault(_FILLED_IN, {})[name] = default
    return int(getattr(scheduler, name))
