"""Checkpoints of Megatron-FSDP, in the format "fsdp_dtensor": torch's own with DTensors, under Megatron-Bridge's names.

It has no common part: everything is in one tree, and a run loads the entries that it needs.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from cloudai_mbridge.training.checkpointing import generators
from cloudai_mbridge.training.checkpointing.layout import FSDP_DTENSOR
from cloudai_mbridge.training.checkpointing.optimizer_state import ensure_state, loading, parts_of
from cloudai_mbridge.training.checkpointing.verify import on_each_rank, read_counters, read_metadata
from cloudai_mbridge.training.compat import checkpoints
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import CheckpointError
from cloudai_mbridge.training.process.device import largest

Tree = dict[str, Any]
_FLOPS = "num_floating_point_operations_so_far"
METADATA = {
    "distrib_optim_sharding_type": FSDP_DTENSOR,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save(
    state: Any, model: list[Any], optimizer: Any, scheduler: Any, flops: float, data_iterator: Any, directory: str
) -> None:
    """Write the run as it is now. A collective."""
    config = state.cfg.checkpoint
    tree = _tree(model, optimizer if config.save_optim else None, scheduler, is_loading=False)
    tree |= {"iteration": state.train_state.step, _FLOPS: float(flops)}
    if config.save_rng:
        of_replicas = state.cfg.rng.data_parallel_random_init
        tree[generators.KEY] = {_place(): generators.own_states(of_replicas=of_replicas)}
    rerun = get_rerun_state_machine().state_dict(data_iterator=data_iterator, ckpt_format=config.ckpt_format)
    if rerun is not None:
        tree["rerun_state_machine"] = rerun
    with checkpoints.quiet():
        state_dict_saver.save(_prepared(tree, model[0]), storage_writer=FileSystemWriter(directory))


def _tree(model: list[Any], optimizer: Any, scheduler: Any, *, is_loading: bool) -> Tree:
    (chunk,) = model  # the format has no names for virtual stages
    tree: Tree = {"checkpoint_version": 3.0, "iteration": 0, "model": chunk.state_dict_for_save_checkpoint()}
    if optimizer is not None:
        ensure_state(optimizer)
        # Parameters wholly on other ranks get a state, for the collectives that follow; one rank's number is saved
        states = [(param, state) for part in parts_of(optimizer) for param, state in part.optimizer.state.items()]
        (steps,) = largest(max((float(state["step"]) for _, state in states if "step" in state), default=0.0))
        for param, state in states:
            if "step" in state and not param.to_local().numel():
                state["step"].fill_(steps)
        tree["optimizer"] = optimizer.sharded_state_dict(tree, is_loading=is_loading, metadata=dict(METADATA))
        if scheduler is not None:
            tree["opt_param_scheduler"] = scheduler.state_dict()
    return tree


def _place() -> str:
    return f"({mpu.get_pipeline_model_parallel_rank()}, {mpu.get_tensor_model_parallel_rank()})"


def _prepared(tree: Tree, chunk: Any) -> Tree:
    """Return the tree with the parts of fused matrices and the experts under names of their own. A collective."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as core

    prepared, config = dict(tree), chunk.config
    core.handle_fp8_extra_state_case(prepared["model"])
    is_swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    splits = [core.handle_swiglu_in_state_dict] if is_swiglu else []
    splits += [core.handle_gdn_in_state_dict] if hasattr(core, "handle_gdn_in_state_dict") else []  # since 0.18
    named = {_bare(name): param for name, param in chunk.named_parameters()}
    chunk.get_parameter = lambda name: named[_bare(name)]  # below all wrappers: Megatron-Core expects one kind
    try:
        for split in splits:
            prepared["model"], states = split(chunk, prepared["model"], prepared.get("optimizer"))
            if states is not None:
                prepared["optimizer"] = states
    finally:
        del chunk.get_parameter
    if config.num_moe_experts:
        prepared["model"] = core.handle_experts_in_state_dict(prepared["model"], config.num_moe_experts)
    preprocess_state_dict_for_uneven_dtensor(prepared)
    return prepared


def _bare(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def load(
    state: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    found: Any,
    *,
    strict: bool,
    skip_model_and_optimizer: bool,
) -> Any:
    """Load the entries of a checkpoint that this run takes; return the model FLOPs so far, as saved. A collective."""
    config, path = state.cfg.checkpoint, found.directory
    if found.weights_only or not config.load_optim:
        optimizer = None
    names = read_metadata(path).state_dict_metadata
    if skip_model_and_optimizer:
        raise CheckpointError(f"{path}: is loaded in place; it cannot only be read")
    loaded = on_each_rank(path, partial(_read, config, model, optimizer, scheduler, found, names))
    on_each_rank(path, partial(_apply, loaded, model, optimizer, scheduler, strict=strict))
    if not found.weights_only:
        state.train_state.load_state_dict(read_counters(path))
    return loaded.get(_FLOPS, 0.0)


@torch.no_grad()
def _read(
    config: CheckpointConfig, model: list[Any], optimizer: Any, scheduler: Any, found: Any, names: Collection[str]
) -> Tree:
    """Load into model and optimizer; return the tree. A collective. names: of the checkpoint's entries.

    Raises CheckpointError: a tensor of this run is not in it.
    """
    path = found.directory

    def has(start: str) -> bool:
        return any(name == start or name.startswith(f"{start}.") for name in names)

    if optimizer is not None and not has("optimizer"):
        raise CheckpointError(f"{path}: holds no optimizer state; set checkpoint.load_optim=False")
    tree = _tree(model, optimizer, scheduler, is_loading=True)
    if not found.weights_only:
        if _FLOPS in names:
            tree[_FLOPS] = 0.0
        if config.load_rng and has(f"{generators.KEY}.{_place()}"):
            of_replicas = has(f"{generators.KEY}.{_place()}.1")
            tree[generators.KEY] = {_place(): generators.own_states(of_replicas=of_replicas)}
    prepared = _prepared(tree, model[0])
    wanted = flatten_state_dict(prepared)[0]
    missing = sorted(k for k, v in wanted.items() if torch.is_tensor(v) and k not in names)
    if missing:
        more = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{path}: does not fit this model: {', '.join(missing[:3])}{more} not in it")
    with checkpoints.quiet():
        planner = DefaultLoadPlanner(allow_partial_load=not config.strict_fsdp_dtensor_load)
        state_dict_loader.load(prepared, storage_reader=FileSystemReader(path), planner=planner)
    # their parts were loaded in place
    return prepared | {name: tree[name] for name in ("model", "optimizer") if name in tree}


def _apply(tree: Tree, model: list[Any], optimizer: Any, scheduler: Any, *, strict: bool) -> None:
    """Apply the entries that `_read` has not loaded in place. A collective."""
    model[0].load_state_dict(tree["model"], strict=strict)
    if optimizer is not None:
        with loading(optimizer, [], scheduler):
            optimizer.load_state_dict(tree["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(tree["opt_param_scheduler"])
    if generators.KEY in tree:
        generators.restore(tree[generators.KEY][_place()])
    dist.barrier()
