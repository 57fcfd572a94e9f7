"""Content of a checkpoint (the tree that Megatron-Core saves, or loads into), its writer and its reader.

A checkpoint has all rows of the gate of a gated product, then all of the up projection. Layers that interleave them
hold blocks of both by turns. As in Megatron-Bridge 0.6 their weights and biases are put in order for each save and back
after each load, and the optimizer's state stays in the order of the layers.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from torch.distributed.tensor import DTensor

from cloudai_mbridge.training.checkpointing import generators
from cloudai_mbridge.training.checkpointing.layout import RUN_CONFIG
from cloudai_mbridge.training.checkpointing.optimizer_state import ensure_state, without_classes
from cloudai_mbridge.training.compat import checkpoints, quantized
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.config.text.yaml_text import read_yaml
from cloudai_mbridge.training.errors import CheckpointError, ConfigError
from cloudai_mbridge.training.peft.apply import is_trained
from cloudai_mbridge.training.peft.config import AdapterConfig
from cloudai_mbridge.training.peft.layers import has_layers_apart

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
        return dict(common["parallelism"])
    if (model := _saved_model(directory)) is None:
        return {}
    sizes = {short: model.get(f"{name}_parallel_size") for short, name in _LONG_NAMES.items()}
    return {short: size or (sizes["tp"] if short == "etp" else 1) for short, size in sizes.items()}


def _saved_model(directory: str) -> dict[str, Any] | None:
    """Return the section `model` of the run that saved a checkpoint, None if it cannot be read."""
    try:
        return dict(read_yaml(Path(directory) / RUN_CONFIG)["model"])
    except (ConfigError, OSError, LookupError, TypeError, ValueError):
        return None


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
        "checkpoint_version": 3.0,  # Megatron's: the order of heads in attention weights
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
    tree |= rows_for_files(models, unwrap_model(model))  # the optimizer has found its parameters in `models`
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


# Class of a layer that interleaves -> the field of the model with the rows of a block
_BLOCKS = {
    "TEGroupedMLP": "moe_mlp_glu_interleave_size",
    "FusedSharedExpertMLP": "moe_shared_expert_glu_interleave_size",
}
_PARAMETER = re.compile(r"(.*)linear_fc1\.(to_wrap\.)?(weight|bias)\d*")
_Trees = dict[str, dict[str, Any]]


def rows_for_files(trees: _Trees, chunks: Iterable[Any]) -> _Trees:
    """Return the sharded states of chunks as a checkpoint holds them; the layers keep their weights."""
    return _ordered(trees, chunks, for_files=True)


def rows_for_layers(trees: _Trees, chunks: Iterable[Any]) -> _Trees:
    """Return the loaded states of chunks as their layers hold them."""
    return _ordered(trees, chunks, for_files=False)


def check_row_order(directory: str, model: Any) -> None:
    """Check that the optimizer's state of a checkpoint is in the order of this model's layers.

    Raises CheckpointError: the layers that saved it had blocks of another size. Nothing is checked without experts, or
    if `run_config.yaml` cannot be read.
    """
    if not getattr(model, "num_moe_experts", None) or (saved := _saved_model(directory)) is None:
        return
    for field in _BLOCKS.values():
        there, here = saved.get(field), getattr(model, field, None)
        if there != here:
            raise CheckpointError(
                f"{directory}: was saved with model.{field} = {there!r}, in whose order of rows the state of the "
                f"optimizer is; use that, not {here!r}, or set checkpoint.load_optim=False"
            )


def _ordered(trees: _Trees, chunks: Iterable[Any], *, for_files: bool) -> _Trees:
    made: _Trees = {}
    for (key, tree), chunk in zip(trees.items(), chunks, strict=True):
        sizes: dict[str, int] = {}  # name of a layer, with a trailing dot -> rows of a block
        for name, module in chunk.named_modules():
            for kind in type(module).__mro__:
                size = getattr(module.config, _BLOCKS[kind.__name__], None) if kind.__name__ in _BLOCKS else None
                if size is None or not module.config.gated_linear_unit:
                    continue
                # In torch's FSDP2 a rank holds only some rows of a matrix: their order is kept
                if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
                    sizes[f"{name}."] = size
        made[key] = dict(tree)
        for name, value in tree.items():
            if (match := _PARAMETER.fullmatch(name)) and match[1] in sizes:
                made[key][name] = _put(value, sizes[match[1]], for_files=for_files)
    return made


def _put(value: Any, size: int, *, for_files: bool) -> Any:
    if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
        return replace(value, data=_put(value.data, size, for_files=for_files))
    rows = quantized.values(value).detach()
    turns = (-1, 2, size) if for_files else (2, -1, size)  # blocks of `size` rows by turns, or one half, the other
    return rows.reshape(*turns, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
