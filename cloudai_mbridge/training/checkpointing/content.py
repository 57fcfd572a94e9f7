"""Content of a checkpoint (the tree that Megatron-Core saves, or loads into), its writer and its reader."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model

from cloudai_mbridge.training.checkpointing import generators, glu_order
from cloudai_mbridge.training.checkpointing.layout import RUN_CONFIG
from cloudai_mbridge.training.checkpointing.optimizer_state import ensure_state, without_classes
from cloudai_mbridge.training.compat import checkpoints
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.peft.apply import is_trained
from cloudai_mbridge.training.peft.config import AdapterConfig
from cloudai_mbridge.training.peft.layers import has_layers_apart

CHECKPOINT_VERSION = 3.0  # Megatron's: the order of heads in attention weights
Metadata = dict[str, Any]


def content_metadata(config: CheckpointConfig, peft: AdapterConfig | None = None) -> Metadata:
    """Return how the optimizer state is cut up; it is saved with the checkpoint and used again to load it.

    "fully_reshardable" loads under any layout, "dp_reshardable" costs no communication and fits one model-parallel
    layout. It matters to the distributed optimizer only. If only some layers have adapters, each layer has its own
    keys.
    """
    fully = config.dist_ckpt_optim_fully_reshardable
    metadata: Metadata = {
        "distrib_optim_sharding_type": "fully_reshardable" if fully else "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if config.distrib_optim_fully_reshardable_mem_efficient:
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = True
    if peft is not None and has_layers_apart(peft):
        metadata["non_homogeneous_layers"] = True
    return metadata


def parallelism() -> dict[str, int]:
    """Return the layout of this run: sizes by Megatron's short names."""
    return {
        "world": dist.get_world_size(),
        "tp": mpu.get_tensor_model_parallel_world_size(),
        "pp": mpu.get_pipeline_model_parallel_world_size(),
        "vp": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": mpu.get_context_parallel_world_size(),
        "ep": mpu.get_expert_model_parallel_world_size(),
        "etp": mpu.get_expert_tensor_parallel_world_size(),
    }


_LONG_NAMES = {
    **{"tp": "tensor_model", "pp": "pipeline_model", "vp": "virtual_pipeline_model"},
    **{"cp": "context", "ep": "expert_model", "etp": "expert_tensor"},
}


def saved_parallelism(directory: str, common: dict[str, Any]) -> dict[str, Any]:
    """Return the layout of the run that saved a checkpoint; {} if it cannot be read.

    Megatron-Bridge has no such entry: then the sizes come from `run_config.yaml`, and "world" is missing.
    """
    if "parallelism" in common:
        layout: dict[str, Any] = common["parallelism"]
        return layout
    try:
        model = dict(read_yaml(Path(directory) / RUN_CONFIG)["model"])
    except (ConfigError, OSError, LookupError, TypeError, ValueError):
        return {}
    sizes = {short: model.get(f"{name}_parallel_size") for short, name in _LONG_NAMES.items()}
    return {short: size or (sizes["tp"] if short == "etp" else 1) for short, size in sizes.items()}


def model_keys(model: list[Any]) -> list[str]:
    """Return the name of every chunk's entry."""
    return ["model"] if len(model) == 1 else [f"model{i}" for i in range(len(model))]


def model_tree(model: list[Any], metadata: Metadata, *, adapters_only: bool = False) -> dict[str, Any]:
    """Return the sharded state of the bare module of every chunk, as Megatron-Bridge saves it.

    Megatron adds process groups to the metadata that it is given: it gets a copy. adapters_only: without frozen
    weights.
    """
    chunks = zip(model_keys(model), unwrap_model(model), strict=True)
    trees = {key: chunk.sharded_state_dict(metadata=dict(metadata)) for key, chunk in chunks}
    if not adapters_only:
        return trees
    return {key: {name: each for name, each in tree.items() if is_trained(name)} for key, tree in trees.items()}


def optimizer_tree(optimizer: Any, models: dict[str, Any], metadata: Metadata, *, is_loading: bool) -> Any:
    """Return the sharded state of the optimizer over the chunks in `models`. A collective."""
    ensure_state(optimizer)
    return without_classes(optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=dict(metadata)))


def tree_to_save(
    state: Any, model: list[Any], optimizer: Any, scheduler: Any, flops: float, data_iterator: Any, metadata: Metadata
) -> dict[str, Any]:
    """Return all that is saved, on every rank. A collective."""
    config = state.cfg.checkpoint
    models = model_tree(model, metadata, adapters_only=state.cfg.peft is not None)
    tree: dict[str, Any] = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.train_state.step,
        "num_floating_point_operations_so_far": float(flops),
        "parallelism": parallelism(),
        **models,
    }
    rerun = get_rerun_state_machine().state_dict(data_iterator=data_iterator, ckpt_format=config.ckpt_format)
    if rerun is not None:  # if the key exists, Megatron-Bridge loads the state
        tree["rerun_state_machine"] = rerun
    if config.save_optim and optimizer is not None:
        tree["optimizer"] = optimizer_tree(optimizer, models, metadata, is_loading=False)
        if scheduler is not None:
            tree["opt_param_scheduler"] = scheduler.state_dict()
    tree |= glu_order.for_files(models, unwrap_model(model))  # the optimizer has found its parameters in `models`
    if config.save_rng:
        tree[generators.KEY] = generators.states_to_save(of_replicas=state.cfg.rng.data_parallel_random_init)
    return tree


_SAVE = "save_strategy"


@checkpoints.quiet()
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


@checkpoints.quiet()
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
