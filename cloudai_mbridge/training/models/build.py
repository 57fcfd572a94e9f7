"""Build this rank's model chunks, wrapped for data parallelism."""

from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.device import current_device
from cloudai_mbridge.training.models.initialization import initialize_weights


def build_model(config: ConfigContainer) -> list[DistributedDataParallel]:
    """Build the chunks, one per virtual pipeline stage. The configuration must be validated, the groups up."""
    stages = config.model.virtual_pipeline_model_parallel_size
    chunks = [_build_chunk(config, stage) for stage in (range(stages) if stages else (None,))]
    return [
        DistributedDataParallel(config.model, config.ddp, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]


def _build_chunk(config: ConfigContainer, vp_stage: int | None) -> Any:
    model = config.model.provide(vp_stage=vp_stage)
    model.to(current_device())
    initialize_weights(model, config.model, config.rng.seed)
    is_half = config.model.bf16 or config.model.fp16
    return Float16Module(config.model, model) if is_half else model
