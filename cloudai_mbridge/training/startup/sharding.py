"""Configurations that cannot be sharded or offloaded: Megatron-Core would fail midway or train something else."""

from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.training.compat.versions import installed_release
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError


def asked_of_sharding(config: ConfigContainer) -> Iterator[str]:
    """Yield a message for each invalid combination."""
    if config.dist.use_torch_fsdp2:
        yield from _of_fsdp2(config)
    yield from _of_megatron_fsdp(config)
    is_sharded = config.dist.use_torch_fsdp2 or config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp
    saves = config.checkpoint.save is not None or config.checkpoint.load is not None
    if is_sharded and saves and installed_release() in ("0.16", "0.17", "0.18"):
        yield "checkpoints of sharded parameters (install Megatron-Core 0.19, or remove checkpoint.save and load)"


def check_offload(config: ConfigContainer) -> None:
    """Refuse an optimizer on the host that Megatron-Core cannot build, of a configuration whose precision is resolved.

    Raises ConfigError.
    """
    half = config.model.bf16 or config.model.fp16
    if config.optimizer.optimizer_cpu_offload and config.optimizer.use_distributed_optimizer and not half:
        raise ConfigError(
            "optimizer.optimizer_cpu_offload = True cannot be combined with use_distributed_optimizer = True in fp32;"
            " use False for one of them, or a precision of 16 bits"
        )


def _of_fsdp2(config: ConfigContainer) -> Iterator[str]:
    model: Any = config.model
    combined = (
        ("optimizer.use_distributed_optimizer", config.optimizer.use_distributed_optimizer, False),
        ("model.expert_model_parallel_size", model.expert_model_parallel_size, 1),  # it would average different experts
        ("model.calculate_per_token_loss", model.calculate_per_token_loss, False),  # nothing divides the gradients
        ("ddp.num_distributed_optimizer_instances", config.ddp.num_distributed_optimizer_instances, 1),
    )
    for field, value, harmless in combined:
        if value != harmless:
            yield f"{field} = {value!r} with dist.use_torch_fsdp2 = True (use {harmless!r})"


def _of_megatron_fsdp(config: ConfigContainer) -> Iterator[str]:
    model: Any = config.model
    is_on = config.ddp.use_megatron_fsdp or config.dist.use_megatron_fsdp
    if getattr(model, "init_model_with_meta_device", False) and not is_on:
        yield "model.init_model_with_meta_device = True without ddp.use_megatron_fsdp (use False)"
    stages, instances = model.virtual_pipeline_model_parallel_size, config.ddp.num_distributed_optimizer_instances
    if is_on and stages is not None and config.checkpoint.ckpt_format == "fsdp_dtensor":
        yield f"model.virtual_pipeline_model_parallel_size = {stages} with ckpt_format = 'fsdp_dtensor' (use None)"
    outer, inner = config.ddp.outer_dp_sharding_strategy, config.ddp.data_parallel_sharding_strategy
    if is_on and outer != "no_shard" and (instances < 2 or inner != "optim_grads_params"):
        yield (
            f"ddp.outer_dp_sharding_strategy = {outer!r} with num_distributed_optimizer_instances = {instances} and"
            f" data_parallel_sharding_strategy = {inner!r} (use 'no_shard', or 2 or more and 'optim_grads_params')"
        )
    if is_on and inner in ("optim_grads", "optim_grads_params") and installed_release() == "0.16":
        for part in _on_one_rank(config):
            yield f"ddp.use_megatron_fsdp = True with {part} on one data-parallel rank (install Megatron-Core 0.19)"
    if instances > 1 and is_on and config.checkpoint.save is not None:
        yield f"checkpoint.save with {instances} instances of Megatron-FSDP's optimizer (remove it)"


def _on_one_rank(config: ConfigContainer) -> Iterator[str]:
    """Yield parts whose shards are all on one rank: Megatron-Core 0.16 adds up their gradients twice."""
    model: Any = config.model
    replicas = getattr(config, "data_parallel_size", None)
    if replicas is None:  # not derived yet; the check runs again once it is
        return
    tp, instances = model.tensor_model_parallel_size, config.ddp.num_distributed_optimizer_instances
    ranks = replicas * model.context_parallel_size
    if ranks == instances:
        yield "the model"
    elif model.num_moe_experts:
        of_expert = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or tp)
        if ranks * tp == of_expert * instances:
            yield "its experts"
