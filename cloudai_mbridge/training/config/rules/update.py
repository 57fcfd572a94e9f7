"""Bring a configuration into its final state, once, before anything is built from it."""

import os
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.enums import AttnBackend

from cloudai_mbridge.training.config.text.summary import print_rank_0, warn_rank_0
from cloudai_mbridge.training.mixed_precision import get_mixed_precision_config
from cloudai_mbridge.training.startup.variables import set_variables

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer


def runtime_config_update(cfg: "ConfigContainer") -> None:
    """Apply variables, precision, data-parallel size and communication overlap, then validate; in this order.

    Overlap depends on the data-parallel size and overrides the precision's settings; the rules see the result of both.

    AssertionError, ValueError: as `ConfigContainer.validate`, or an unknown precision recipe.
    """
    set_variables(cfg.env_vars)
    if cfg.mixed_precision is not None:
        precision = get_mixed_precision_config(cfg.mixed_precision)
        cfg.mixed_precision = precision
        precision.finalize()
        precision.setup(cfg.model, cfg.optimizer, cfg.ddp)
    cfg.set_data_parallel_size()
    if cfg.comm_overlap is not None:
        cfg.comm_overlap.finalize()
        cfg.comm_overlap.setup(cfg.model, cfg.optimizer, cfg.ddp)
    cfg.validate()


def mimo_runtime_config_update(cfg: "ConfigContainer") -> None:
    """Finalize the sections that do not depend on the model, for a model of several modules, each with its own layout.

    The loop sees a data-parallel size of 1. Precision, overlap and the model itself are left to the code that
    builds the modules.
    """
    set_variables(cfg.env_vars)
    cfg.data_parallel_size = 1
    for section in (cfg.optimizer, cfg.ddp, cfg.logger, cfg.train, cfg.scheduler, cfg.checkpoint):
        finalize(section)
    _validate_and_sync_distributed_optimizer_settings(cfg)
    apply_deterministic_mode(cfg)


def finalize(section: Any) -> None:
    """Finalize a section if it has this method."""
    if hasattr(section, "finalize"):
        section.finalize()


def _validate_and_sync_distributed_optimizer_settings(config: "ConfigContainer") -> None:
    """Turn on in both sections the settings of either: the distributed optimizer, overlapped parameter gather.

    Rank 0 warns if they differed.
    """
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        ddp, optimizer = getattr(config.ddp, name, False), getattr(config.optimizer, name, False)
        if ddp != optimizer:
            if name == "use_distributed_optimizer" or optimizer:  # overlap is usually set in ddp alone
                warn_rank_0(f"ddp.{name}={ddp} and optimizer.{name}={optimizer}: both are set to True")
            setattr(config.ddp, name, True)
            setattr(config.optimizer, name, True)


def let_the_loss_scale_find_overflow(config: "ConfigContainer") -> None:
    """Switch the NaN checks off under a dynamic loss scale, which finds its value by gradients that overflow."""
    checks = ((config.ddp, "check_for_nan_in_grad"), (config.rerun_state_machine, "check_for_nan_in_loss"))
    if not config.optimizer.fp16 or config.optimizer.loss_scale is not None:
        return
    if on := [name for section, name in checks if getattr(section, name)]:
        print_rank_0(f"{' and '.join(on)} switched off: fp16 with a dynamic loss scale skips steps that overflow")
    for section, name in checks:
        setattr(section, name, False)


NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def apply_deterministic_mode(config: "ConfigContainer") -> None:
    """Check that nothing in use is non-deterministic, then make torch refuse any other such operation.

    `NCCL_ALGO` is a rule of the configuration, so it is checked without a GPU too.

    AssertionError: flash attention, fused cross entropy, or NCCL free to choose its algorithm.
    """
    model = config.model
    if not getattr(model, "deterministic_mode", False):
        return
    assert getattr(model, "attention_backend", None) != AttnBackend.flash, (
        "deterministic_mode: flash attention is not deterministic; choose another model.attention_backend"
    )
    assert not getattr(model, "cross_entropy_loss_fusion", False), (
        "deterministic_mode: fused cross entropy is not deterministic; set model.cross_entropy_loss_fusion=False"
    )
    algorithm = os.environ.get("NCCL_ALGO")
    assert algorithm in NCCL_ALGORITHMS, (
        f"deterministic_mode: the environment's NCCL_ALGO must be one of {', '.join(NCCL_ALGORITHMS)}, "
        f"got {algorithm!r}"
    )
    torch.use_deterministic_algorithms(True)
