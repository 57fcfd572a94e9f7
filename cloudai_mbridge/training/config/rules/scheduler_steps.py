"""From iterations or samples to the scheduler's own unit, which is samples: it advances by those of each step.

With a batch ramp iterations x final batch size over-counts: the schedule ends later than `lr_decay_iters`.
"""

import warnings
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.training.config.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer

_FILLED_IN = "_filled_in"  # attribute, not field: neither compared nor written to files


def check_training_scheduler_compatibility(config: "ConfigContainer") -> None:
    """Check that the schedule is given in the unit of the training length.

    Raises:
        AssertionError: iterations with sample-based training, samples with iteration-based training, or two warm-ups.
    """
    used, other = ("samples", "iters") if config.train.train_samples is not None else ("iters", "samples")
    scheduler = config.scheduler
    assert getattr(scheduler, f"lr_decay_{other}") is None, (
        f"train.train_{used} is set: use scheduler.lr_decay_{used}, not lr_decay_{other}"
    )
    assert getattr(scheduler, f"lr_warmup_{other}") == 0, (
        f"train.train_{used} is set: use scheduler.lr_warmup_{used}, not lr_warmup_{other}"
    )
    assert scheduler.lr_warmup_fraction is None or getattr(scheduler, f"lr_warmup_{used}") == 0, (
        f"scheduler: give one of lr_warmup_fraction and lr_warmup_{used}, not both"
    )


def calculate_scheduler_steps(config: "ConfigContainer") -> None:
    """Set the scheduler's `lr_decay_steps`, `lr_warmup_steps`, `wd_incr_steps` and `wsd_decay_steps`, all in samples.

    Decay lasts as long as training unless given; the anneal of WSD lasts as long as the decay unless given. Both
    defaults are written into the scheduler's fields. `lr_warmup_steps` is a float where it comes from a fraction.

    Raises:
        ValueError: a decay of no steps, or no batch size to count samples with.
    """
    forget_filled_in(config.scheduler)
    if config.train.train_samples is not None:
        _from_samples(config.scheduler, config.train.train_samples)
    else:
        _from_iterations(config.scheduler, config.train.train_iters, config.train.global_batch_size)
    _check_lengths(config.scheduler)


def forget_filled_in(scheduler: SchedulerConfig) -> None:
    """Clear the defaults that an earlier call filled in and that have not changed since.

    Without this a second validation would take them for the user's values, and keep the decay of a training length
    that has changed.
    """
    for name, value in vars(scheduler).pop(_FILLED_IN, {}).items():
        if getattr(scheduler, name) == value:
            setattr(scheduler, name, None)


def _from_samples(scheduler: SchedulerConfig, train_samples: int) -> None:
    decay = _fill_in(scheduler, "lr_decay_samples", train_samples)
    if scheduler.lr_decay_style == "WSD":
        _fill_in(scheduler, "lr_wsd_decay_samples", decay)
    scheduler.lr_decay_steps = decay
    scheduler.wd_incr_steps = train_samples
    scheduler.wsd_decay_steps = scheduler.lr_wsd_decay_samples
    scheduler.lr_warmup_steps = _warmup(scheduler, scheduler.lr_warmup_samples)


def _from_iterations(scheduler: SchedulerConfig, train_iters: int | None, global_batch_size: int | None) -> None:
    if train_iters is None or global_batch_size is None:
        raise ValueError("train.train_iters and train.global_batch_size are needed to count the schedule in samples")
    decay = _fill_in(scheduler, "lr_decay_iters", train_iters)
    if scheduler.lr_decay_style == "WSD":
        _fill_in(scheduler, "lr_wsd_decay_iters", decay)
    anneal = scheduler.lr_wsd_decay_iters
    scheduler.lr_decay_steps = decay * global_batch_size
    scheduler.wd_incr_steps = train_iters * global_batch_size
    scheduler.wsd_decay_steps = None if anneal is None else anneal * global_batch_size
    scheduler.lr_warmup_steps = _warmup(scheduler, scheduler.lr_warmup_iters * global_batch_size)


def _fill_in(scheduler: SchedulerConfig, name: str, default: int) -> int:
    if getattr(scheduler, name) is None:
        setattr(scheduler, name, default)
        vars(scheduler).setdefault(_FILLED_IN, {})[name] = default
    return int(getattr(scheduler, name))


def _warmup(scheduler: SchedulerConfig, samples: int) -> Any:
    """Return the warm-up in samples; a fraction of the decay is not rounded, as the scheduler only divides by it."""
    if scheduler.lr_warmup_fraction is None:
        return samples
    assert scheduler.lr_decay_steps is not None
    return scheduler.lr_warmup_fraction * scheduler.lr_decay_steps


def _check_lengths(scheduler: SchedulerConfig) -> None:
    decay, warmup = scheduler.lr_decay_steps, scheduler.lr_warmup_steps
    assert decay is not None
    assert warmup is not None
    if decay <= 0:
        raise ValueError(f"the learning rate decays over {decay} samples; give a longer training or a longer decay")
    if warmup >= decay:  # Megatron-Core's scheduler refuses it; a short trial of a long run's settings must still run
        warnings.warn(
            f"the warm-up of {warmup} samples does not end before the decay of {decay}; it is cut to {decay - 1}",
            UserWarning,
            stacklevel=2,
        )
        scheduler.lr_warmup_steps = decay - 1
