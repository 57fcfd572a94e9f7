"""Wrap the chunks of a model for data parallelism: replicated (DDP), or sharded by Megatron-FSDP or torch's FSDP2."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.models.provider import FUSES_WEIGHT_GRADIENT
from cloudai_mbridge.training.process.groups import grid_groups


def wrap_chunks(config: ConfigContainer, chunks: list[Any]) -> list[Any]:
    """Return the chunks, each wrapped as the configuration sets. The process groups must be up; a collective."""
    if config.dist.use_torch_fsdp2:
        from megatron.core.distributed import TorchFullyShardedDataParallel

        wrapped = [TorchFullyShardedDataParallel(config.model, config.ddp, chunk) for chunk in chunks]
        for chunk in wrapped:
            # The backward pass has reduced the gradients; 0.16 takes no arguments here
            chunk.finish_grad_sync = lambda *args, **kwargs: None
        return wrapped
    kind: Any = partial(DistributedDataParallel, pg_collection=grid_groups())
    if config.ddp.use_megatron_fsdp:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        kind = FullyShardedDataParallel
    in_step = config.optimizer.overlap_param_gather_with_optimizer_step  # gathers a whole chunk at a time
    wrapped = [
        kind(config.model, sized(config.ddp, chunk), chunk, disable_bucketing=in_step or i > 0)
        for i, chunk in enumerate(chunks)
    ]
    if config.ddp.use_megatron_fsdp:
        for chunk in wrapped:
            _divide_gradients_once(chunk.param_and_grad_buffer, in_collective=config.ddp.average_in_collective)
            _accumulate_whole_gradients(chunk)
    return wrapped


def shards_between_instances(ddp: Any) -> bool:
    """Return whether Megatron-FSDP shards over all ranks: within the instances of its optimizer, and between them."""
    return getattr(ddp, "use_megatron_fsdp", False) and ddp.outer_dp_sharding_strategy != "no_shard"


def _divide_gradients_once(shards: Any, *, in_collective: bool) -> None:
    """Have Megatron-FSDP divide the sum of gradients over the ranks by their number, once.

    Sharded between instances, Megatron-Core 0.17 to 0.19 does not divide it: the buffer that is reduced has no factor.
    In a group of one rank, as for experts with a different set on every rank, it divides the sum so far
    in each micro-batch.
    """
    later = []
    for group in shards.parameter_groups:
        if (whole := group.main_grad_buffer) is None:
            continue
        reduced, factor = getattr(group, "hfsdp_helper_gbuf", None) or whole, whole.gradient_scaling_factor
        is_alone = reduced.data_parallel_group.size() == 1 and factor not in (None, 1.0) and not in_collective
        reduced.gradient_scaling_factor = None if is_alone else factor
        if is_alone:
            later.append((whole, factor))
    if not later:
        return
    attach = shards.update_main_grads

    def divide_and_attach() -> None:
        for buffer, factor in later:
            buffer.data.mul_(factor)
        attach()

    shards.update_main_grads = divide_and_attach


def _accumulate_whole_gradients(chunk: Any) -> None:
    """Let layers whose gradients Megatron-FSDP keeps whole leave their accumulation to it.

    It has fused products overwrite a gradient, since it adds the shards of each micro-batch up after a reduction. For
    gradients that are not sharded, as in a group of one rank, only the last micro-batch would be left.
    """
    shards = chunk.param_and_grad_buffer
    whole = {
        shards.param_to_name[param]
        for group in shards.parameter_groups
        if (buffer := getattr(group, "hfsdp_helper_gbuf", None) or group.main_grad_buffer) is not None
        if not buffer.is_data_distributed
        for param in group.params
    }
    root = shards.module
    for name, module in root.named_modules():
        own = {f"{name}.{each}" for each, _ in module.named_parameters(recurse=False)}
        if getattr(module, FUSES_WEIGHT_GRADIENT, False) and own & whole:
            setattr(module, FUSES_WEIGHT_GRADIENT, False)


def register_buffers(config: ConfigContainer, model: list[Any]) -> None:
    """Register Megatron-FSDP's buffers with NCCL, if `ddp.fsdp_manual_registration` leaves it to the loop.

    After a step, when they have been allocated. A collective.
    """
    if config.ddp.use_megatron_fsdp and getattr(config.ddp, "fsdp_manual_registration", False):
        for chunk in model:
            chunk.param_and_grad_buffer.manual_buffer_registration()


def sized(ddp: Any, chunk: Any) -> Any:
    """Return the DDP settings with the bucket size of `num_buckets`, which Megatron-Core itself does not read."""
    if (number := getattr(ddp, "num_buckets", None)) is None:
        return ddp
    parameters = sum(each.numel() for each in chunk.parameters() if each.requires_grad)
    return replace(ddp, bucket_size=-(-parameters // number))
