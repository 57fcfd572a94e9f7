"""Local checkpoints: each rank's part on a disk of its own machine, and with replication on others' too.

NVIDIA Resiliency Extension keeps them, the newest only; they fit the layout that saved them. They are pickles as a
whole, and reading pickles runs code that they name.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

from cloudai_mbridge.training.checkpointing import layout
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import CheckpointError
from cloudai_mbridge.training.resilience.packages import nvrx

MANAGER, _CACHE = "local_checkpoint_manager", "local_checkpoint_cache"  # Megatron-Bridge's names
COUNTERS = "train_state_metadata"
LOADED = "local_checkpoint_loaded"


def open_manager(config: CheckpointConfig) -> Any:
    """Return the package's manager. A collective with replication. Raises CheckpointError: no whole groups of ranks."""
    managers = nvrx("checkpointing.local.ckpt_managers.local_manager")
    replicas = None
    if config.replication:
        jump, factor, world = config.replication_jump, config.replication_factor, dist.get_world_size()
        if world % ((jump or 1) * factor):
            sizes = f"checkpoint.replication_jump = {jump} x replication_factor = {factor}"
            raise CheckpointError(f"{sizes} does not divide the {world} ranks")
        strategies = nvrx("checkpointing.local.replication.strategies")
        replicas = strategies.CliqueReplicationStrategy.from_replication_params(jump, factor)
    return managers.LocalCheckpointManager(config.non_persistent_local_ckpt_dir, repl_strategy=replicas)


def newest(config: CheckpointConfig, context: dict[str, Any]) -> int:
    """Return the iteration to resume from, -1 if it is missing or another checkpoint is named. A collective."""
    if MANAGER not in context or config.finetune or config.ckpt_step is not None:
        return -1
    return int(context[MANAGER].find_latest())


def persistent_iteration(config: CheckpointConfig) -> int:
    """Return the iteration of the newest persistent checkpoint, -1 without any. Rank 0 only."""
    iterations = [-1] if config.load is None else layout.saved_iterations(Path(config.load))
    return max(iterations, default=-1)


def save(config: CheckpointConfig, context: dict[str, Any], tree: dict[str, Any], progress: Any) -> AsyncRequest | None:
    """Save `tree` and the counters; with `async_save`, return the request for the background. A collective."""
    tree[COUNTERS] = progress.state_dict()
    parts, structure = MCoreTensorAwareStateDict.from_state_dict(
        tree,
        algo=config.non_persistent_local_ckpt_algo,
        parallelization_group=_replicas(),
        cached_metadata=context.get(_CACHE) if config.ckpt_assume_constant_structure else None,
    )
    context[_CACHE] = structure
    request = context[MANAGER].save(parts, progress.step, is_async=config.async_save)
    return None if request is None else AsyncRequest(request.async_fn, request.async_fn_args, request.finalize_fns)


def read(config: CheckpointConfig, saved: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Return `tree` with the values that `saved`, a state dict of the package, has. A collective."""
    algorithm = config.non_persistent_local_ckpt_algo
    return dict(saved.to_state_dict(tree, algo=algorithm, parallelization_group=_replicas()))


def _replicas() -> Any:
    return mpu.get_data_parallel_group(with_context_parallel=True)
