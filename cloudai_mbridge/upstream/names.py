"""Functions that exist under Megatron-Bridge's names only, for users' scripts; nothing here uses them."""

import os
from typing import Any

import torch.distributed as dist

from cloudai_mbridge.training.config.optimizer import OptimizerConfig
from cloudai_mbridge.training.config.scheduler import SchedulerConfig

DEFAULT_NULL_TOKENIZER_VOCAB_SIZE = 32000


def get_rank_safe() -> int:
    """Return this rank from the process group, or from `RANK` before its initialization."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size_safe() -> int:
    """Return the number of ranks from the process group, or from `WORLD_SIZE` before its initialization."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank_preinit() -> int:
    """Return the rank on this machine, from `LOCAL_RANK`."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_last_rank() -> int:
    """Return the last rank of the process group, 0 without one."""
    return dist.get_world_size() - 1 if dist.is_initialized() else 0


def is_last_rank() -> bool:
    """Return whether this rank is the last one."""
    return get_rank_safe() == get_last_rank()


def print_rank_last(message: str) -> None:
    """Print on the last rank."""
    if is_last_rank():
        print(message, flush=True)


def distributed_fused_adam_with_cosine_annealing(
    precision: str = "bf16-mixed",
    lr_warmup_iters: int = 2000,
    lr_decay_iters: int | None = None,
    *args: Any,
    **options: Any,
) -> tuple[OptimizerConfig, SchedulerConfig]:
    """Return Adam with the distributed optimizer, and a cosine schedule in iterations.

    options: passed to `_adam_and_cosine`.
    """
    return _adam_and_cosine(
        precision, {"lr_warmup_iters": lr_warmup_iters, "lr_decay_iters": lr_decay_iters}, *args, **options
    )


def distributed_fused_adam_with_cosine_annealing_samples(
    precision: str = "bf16-mixed",
    lr_warmup_samples: int | None = None,
    lr_decay_samples: int | None = None,
    *args: Any,
    **options: Any,
) -> tuple[OptimizerConfig, SchedulerConfig]:
    """Return the same with a schedule in samples, for `train.train_samples`."""
    steps = {"lr_warmup_samples": lr_warmup_samples, "lr_decay_samples": lr_decay_samples}
    return _adam_and_cosine(precision, steps, *args, **options)


def _adam_and_cosine(
    precision: str,
    steps: dict[str, int | None],
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    adam_eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_lr: float = 1e-4,
    min_lr: float | None = None,
    clip_grad: float = 1.0,
    start_weight_decay: float = 0.033,
    end_weight_decay: float = 0.033,
    weight_decay_incr_style: Any = "constant",
    lr_decay_style: Any = "cosine",
) -> tuple[OptimizerConfig, SchedulerConfig]:
    """Return the sections of optimizer and schedule. min_lr: by default a tenth of max_lr."""
    formats = {"bf16": precision == "bf16-mixed", "fp16": precision == "16-mixed"}
    rates = {"lr": max_lr, "min_lr": 0.1 * max_lr if min_lr is None else min_lr}
    adam = {"adam_beta1": adam_beta1, "adam_beta2": adam_beta2, "adam_eps": adam_eps, "weight_decay": weight_decay}
    optimizer = OptimizerConfig(
        optimizer="adam", use_distributed_optimizer=True, clip_grad=clip_grad, **formats, **rates, **adam
    )
    scheduler = SchedulerConfig(
        start_weight_decay=start_weight_decay,
        end_weight_decay=end_weight_decay,
        weight_decay_incr_style=weight_decay_incr_style,
        lr_decay_style=lr_decay_style,
        lr_warmup_init=0.0,
        override_opt_param_scheduler=True,
        **steps,  # type: ignore[arg-type]
    )
    return optimizer, scheduler
