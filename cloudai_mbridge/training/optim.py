"""Megatron's optimizer and learning-rate scheduler."""

from typing import Any

from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.optimizer import (
    OptimizerConfig,
    OptimizerConfigOverrideProvider,
    OptimizerConfigOverrideProviderContext,
)
from cloudai_mbridge.training.config.scheduler import SchedulerConfig
from cloudai_mbridge.training.process.device import current_device


def build_optimizer(config: ConfigContainer, model: list[Any]) -> MegatronOptimizer:
    """Build the optimizer over the model chunks: mixed precision and sharding as configured."""
    provider, use_gloo = config.optimizer_config_override_provider, config.dist.use_gloo_process_groups
    return _build_optimizer(config.optimizer, config.scheduler, model, use_gloo, provider)


def setup_optimizer(
    optimizer_config: OptimizerConfig,
    scheduler_config: SchedulerConfig,
    model: Any,
    use_gloo_process_groups: bool = False,
    pg_collection: Any = None,
    optimizer_config_override_provider: OptimizerConfigOverrideProvider | None = None,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build optimizer and scheduler, from sections that are finalized. pg_collection: not used."""
    provider = optimizer_config_override_provider or OptimizerConfigOverrideProvider()
    chunks = model if isinstance(model, list) else [model]
    optimizer = _build_optimizer(optimizer_config, scheduler_config, chunks, use_gloo_process_groups, provider)
    return optimizer, _build_scheduler(optimizer_config, scheduler_config, optimizer)


def _build_optimizer(
    config: OptimizerConfig,
    scheduler: SchedulerConfig,
    model: list[Any],
    use_gloo: bool,
    provider: OptimizerConfigOverrideProvider,
) -> MegatronOptimizer:
    on_cpu = current_device().type == "cpu"
    context = OptimizerConfigOverrideProviderContext(scheduler, config, model)
    optimizer = get_megatron_optimizer(
        config,
        model,
        config_overrides=provider.build_config_overrides(context),
        use_gloo_process_groups=use_gloo and not on_cpu,  # on a CPU all groups are gloo
    )
    if on_cpu and config.optimizer == "adam":
        _use_fused_adam(optimizer)
    return optimizer


def _use_fused_adam(optimizer: Any) -> None:
    """Take torch's fused CPU AdamW: half the optimizer time of its per-parameter loop."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def build_scheduler(config: ConfigContainer, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the laws of learning rate and weight decay. Megatron counts their steps in samples."""
    return _build_scheduler(config.optimizer, config.scheduler, optimizer)


def _build_scheduler(o: OptimizerConfig, s: SchedulerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
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
