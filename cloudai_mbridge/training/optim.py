"""Megatron's optimizer and learning-rate scheduler."""

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.optimizer import (
    OptimizerConfig,
    OptimizerConfigOverrideProvider,
    OptimizerConfigOverrideProviderContext,
)
from cloudai_mbridge.training.config.scheduler import SchedulerConfig
from cloudai_mbridge.training.models.data_parallel import shards_between_instances
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.groups import grid_groups

logger = logging.getLogger(__name__)


def build_optimizer(config: ConfigContainer, model: list[Any]) -> MegatronOptimizer:
    """Build the optimizer over the model chunks: mixed precision and sharding as configured."""
    device = current_device().type
    context = OptimizerConfigOverrideProviderContext(config.scheduler, config.optimizer, model)
    optimizer = get_megatron_optimizer(
        config.optimizer,
        model,
        config_overrides=config.optimizer_config_override_provider.build_config_overrides(context),
        # elsewhere all groups are of one kind
        use_gloo_process_groups=config.dist.use_gloo_process_groups and device == "cuda",
        pg_collection=grid_groups(),
    )
    if getattr(megatron_config := getattr(model[0], "config", None), "use_mup", False):
        logger.info("μP enabled (width_mult=%.4g)", megatron_config.mup_width_mult)  # type: ignore[union-attr]
    if device == "cpu" and config.optimizer.optimizer == "adam" and not config.optimizer.optimizer_cpu_offload:
        # torch's fused CPU AdamW takes half the time of its per-parameter loop
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
    if shards_between_instances(getattr(model[0], "ddp_config", None)):
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.grad_stats_parallel_group = dist.group.WORLD  # Megatron-Core adds up norms within an instance alone

    def take_saved_copies(inner: Any) -> None:  # Megatron-Core expects all parameters to be in 16 bits
        for param, state in inner.state.items():
            inner.param_to_inner_param[param].data.copy_(state["master_param"])

    for inner in _offloaded(optimizer):
        inner._update_fp32_params_by_new_state = partial(take_saved_copies, inner)
        if any(each not in inner.param_to_inner_param for group in inner.param_groups for each in group["params"]):
            inner._init_sub_optimizers()  # Megatron has replaced parameters in 16 bits by main parameters
    return optimizer


def _offloaded(optimizer: Any) -> list[Any]:
    parts = [getattr(part, "optimizer", None) for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [inner for inner in parts if isinstance(inner, HybridDeviceOptimizer)]


def sync_hybrid_device_optimizer_fp32_master_copies(optimizer: Any) -> bool:
    """Copy the parameters as they are now into the copies that an offloaded optimizer steps; return whether it is one.

    To be called when weights have been loaded without the optimizer's state: `reload_model_params` renews the main
    parameters alone, and the next step would write the copies back over them.
    """
    for inner in (offloaded := _offloaded(optimizer)):
        for param, copy in inner.param_to_inner_param.items():
            if copy is not param:
                copy.data.copy_(param.data)
    return bool(offloaded)


def setup_optimizer(
    optimizer_config: OptimizerConfig,
    scheduler_config: SchedulerConfig,
    model: Any,
    use_gloo_process_groups: bool = False,
    pg_collection: Any = None,
    optimizer_config_override_provider: OptimizerConfigOverrideProvider | None = None,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build optimizer and scheduler, from sections that are finalized. pg_collection: not used."""
    sections: Any = SimpleNamespace(
        optimizer=optimizer_config,
        scheduler=scheduler_config,
        dist=SimpleNamespace(use_gloo_process_groups=use_gloo_process_groups),
        optimizer_config_override_provider=optimizer_config_override_provider or OptimizerConfigOverrideProvider(),
    )
    optimizer = build_optimizer(sections, model if isinstance(model, list) else [model])
    return optimizer, build_scheduler(sections, optimizer)


def build_scheduler(config: ConfigContainer, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the laws of learning rate and weight decay. Megatron counts their steps in samples."""
    o, s = config.optimizer, config.scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=s.lr_warmup_init,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=s.lr_warmup_steps,
        lr_decay_steps=s.lr_decay_steps,
        lr_decay_style=s.lr_decay_style,
        start_wd=o.weight_decay if s.start_weight_decay is None else s.start_weight_decay,
        end_wd=o.weight_decay if s.end_weight_decay is None else s.end_weight_decay,
        wd_incr_steps=s.wd_incr_steps,
        wd_incr_style=s.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=s.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=s.override_opt_param_scheduler,
        wsd_decay_steps=s.wsd_decay_steps,
        lr_wsd_decay_style=s.lr_wsd_decay_style,
    )
