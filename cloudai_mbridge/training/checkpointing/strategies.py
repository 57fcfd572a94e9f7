"""Who writes and reads which part: Megatron-Core's strategies, as configured."""

from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from cloudai_mbridge.training.compat import checkpoints
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig

_SAVE = "save_strategy"


def save_strategy(config: CheckpointConfig, context: dict[str, Any]) -> Any:
    """Return the writer. With a constant structure it is kept in `context`, with the plan of the first save."""
    if config.ckpt_assume_constant_structure and _SAVE in context:
        return context[_SAVE]
    strategy = checkpoints.writer(
        thread_count=config.storage_writers_per_rank, cached_metadata=config.ckpt_assume_constant_structure
    )
    if config.fully_parallel_save:
        strategy = FullyParallelSaveStrategyWrapper(
            strategy,
            _group(config.ckpt_fully_parallel_save_process_group),
            do_cache_distribution=config.ckpt_assume_constant_structure,
        )
    if config.ckpt_assume_constant_structure:
        context[_SAVE] = strategy
    return strategy


def load_strategy(config: CheckpointConfig) -> Any:
    """Return the reader; with `fully_parallel_load` every replica reads a part and they exchange them."""
    strategy: Any = TorchDistLoadShardedStrategy()
    if config.fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(
            strategy,
            _group(config.ckpt_fully_parallel_load_process_group),
            exchange_algo=config.ckpt_fully_parallel_load_exchange_algo,
        )
    return strategy


def _group(name: str) -> Any:
    if name == "ep_dp":
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group(with_context_parallel=True)
