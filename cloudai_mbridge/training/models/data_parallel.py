"""Wrap the chunks of a model for data parallelism: replicated (DDP), or sharded by Megatron-FSDP or torch's FSDP2."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.process.grid_groups import grid_groups


def wrap_chunks(config: ConfigContainer, chunks: list[Any]) -> list[Any]:
    """Return the chunks, each wrapped as the configuration sets. The process groups must be up; a collective."""
    if config.dist.use_torch_fsdp2:
        return [_torch_fsdp2()(config.model, config.ddp, chunk) for chunk in chunks]
    kind: Any = partial(DistributedDataParallel, pg_collection=grid_groups())
    if config.ddp.use_megatron_fsdp:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        kind = FullyShardedDataParallel
    in_step = config.optimizer.overlap_param_gather_with_optimizer_step  # gathers a whole chunk at a time
    return [
        kind(config.model, sized(config.ddp, chunk), chunk, disable_bucketing=in_step or i > 0)
        for i, chunk in enumerate(chunks)
    ]


def register_buffers(config: ConfigContainer, model: list[Any]) -> None:
    """Register Megatron-FSDP's buffers with NCCL, where `ddp.fsdp_manual_registration` leaves it to the loop.

    After a step, when they have been allocated. A collective.
    """
    if config.ddp.use_megatron_fsdp and getattr(config.ddp, "fsdp_manual_registration", False):
        for chunk in model:
            chunk.param_and_grad_buffer.manual_buffer_registration()


def _torch_fsdp2() -> Any:
    from megatron.core.distributed import TorchFullyShardedDataParallel

    class Wrapped(TorchFullyShardedDataParallel):  # type: ignore[misc]
        def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing: the backward pass has reduced the gradients. Megatron-Core 0.16 takes no arguments here."""

    return Wrapped


def sized(ddp: Any, chunk: Any) -> Any:
    """Return the DDP settings with the bucket size of `num_buckets`, which Megatron-Core itself does not read."""
    if (number := getattr(ddp, "num_buckets", None)) is None:
        return ddp
    parameters = sum(each.numel() for each in chunk.parameters() if each.requires_grad)
    return replace(ddp, bucket_size=-(-parameters // number))
