"""What the process groups of a grid do not have, where Megatron-Bridge would pass over it in silence."""

from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.training.config.container import ConfigContainer


def asked_of_groups(config: ConfigContainer) -> Iterator[str]:
    """Yield, in words, what cannot be combined."""
    chosen: Any = config.dist
    if not chosen.use_decentralized_pg:
        return
    combined: tuple[tuple[str, Any, Any], ...] = (
        ("dist.use_tp_pp_dp_mapping", chosen.use_tp_pp_dp_mapping, False),
        ("dist.use_sharp", chosen.use_sharp, False),
        ("dist.nccl_communicator_config_path", chosen.nccl_communicator_config_path, None),
        ("dist.high_priority_stream_groups", chosen.high_priority_stream_groups or [], []),
        ("model.pipeline_model_parallel_comm_backend", config.model.pipeline_model_parallel_comm_backend, None),
        ("ddp.num_distributed_optimizer_instances", config.ddp.num_distributed_optimizer_instances, 1),
    )
    for field, value, harmless in combined:
        if value != harmless:
            yield f"{field} = {value!r} with dist.use_decentralized_pg = True (use {harmless!r})"
