"""Megatron's optimizer and learning-rate scheduler."""

from typing import Any

from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.device import current_device


def build_optimizer(config: ConfigContainer, model: list[Any]) -> MegatronOptimizer:
    """Build Adam over the model chunks: mixed precision and sharding as configured."""
    o, params_dtype = config.optimizer, model[0].config.params_dtype
    on_cpu = current_device().type == "cpu"
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=o.lr,
            min_lr=o.min_lr,
            weight_decay=o.weight_decay,
            adam_beta1=o.adam_beta1,
            adam_beta2=o.adam_beta2,
            adam_eps=o.adam_eps,
            clip_grad=o.clip_grad,
            bf16=model[0].config.bf16,
            params_dtype=params_dtype,
            use_distributed_optimizer=o.use_distributed_optimizer,
            overlap_param_gather=config.ddp.overlap_param_gather,
        ),
        model,
        use_gloo_process_groups=not on_cpu,  # on a CPU the groups are gloo already
    )
    if on_cpu:
        _use_fused_adam(optimizer)
    return optimizer


def _use_fused_adam(optimizer: Any) -> None:
    """Take torch's fused CPU AdamW: half the optimizer time of its per-parameter loop."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def build_scheduler(config: ConfigContainer, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the learning-rate law. Megatron counts its steps in samples."""
    s, o, batch = config.scheduler, config.optimizer, config.train.global_batch_size
    decay_iters = s.lr_decay_iters or config.train.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=s.lr_warmup_iters * batch,
        lr_decay_steps=decay_iters * batch,
        lr_decay_style=s.lr_decay_style,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=config.train.train_iters * batch,
        wd_incr_style="constant",
    )
