"""Optimizer state in checkpoints: needs of torch's own optimizers, parameter groups arranged for this run, DTensors.

Megatron-Core 0.16 expects Transformer Engine's Adam, which counts its steps per parameter group. torch's Adam keeps a
step tensor per parameter, and with the distributed optimizer Megatron then (1) refuses a state without steps, (2) looks
for a step in the loaded parameter state, and (3) gives all parameters one shared step tensor, which torch advances once
per parameter. It also takes over flags of the machine that saved, such as `fused`. With Transformer Engine or Apex none
of this applies, and nothing is done.

Of torch's FSDP2, in the format "torch_dist", Megatron-Core saves the local parts of DTensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch.distributed.tensor import DTensor

from cloudai_mbridge.training.checkpointing.verify import read_common
from cloudai_mbridge.training.compat.checkpoints import KIND, found_by_kind, kind_of
from cloudai_mbridge.training.compat.transformer_engine import fused_adam
from cloudai_mbridge.training.errors import CheckpointError

_CLASSES = ("cpu_optimizer_cls", "gpu_optimizer_cls")  # in the groups of an offloaded optimizer
_MOMENTS, _FP32 = ("exp_avg", "exp_avg_sq"), {torch.float32}
_OF_THE_MACHINE = ("fused", "foreach", "capturable", "differentiable", "offload_fraction", *_CLASSES)
_OF_THE_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


def parts_of(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers behind a chained one, except any with nothing to train."""
    return [part for part in _parts(optimizer) if not getattr(part, "is_stub_optimizer", False)]


def ensure_state(optimizer: Any) -> None:
    """Give every parameter the state that it has before its first step: Megatron saves and loads into that."""
    for part in parts_of(optimizer):
        if getattr(part, "init_state_fn", None) is None:  # SGD: Megatron calls it all the same
            part.init_state_fn = lambda inner, config=None: None
        offloaded = isinstance(part.optimizer, HybridDeviceOptimizer)
        for inner in part.optimizer.sub_optimizers if offloaded else [part.optimizer]:
            for group in inner.param_groups:
                for param in group["params"]:
                    if isinstance(inner, torch.optim.Adam):  # AdamW is one too
                        state = inner.state[param]
                        state.setdefault("exp_avg", torch.zeros_like(param.data))
                        state.setdefault("exp_avg_sq", torch.zeros_like(param.data))
                        step = torch.zeros((), dtype=torch.float32, device=_step_device(group, param))
                        state.setdefault("step", step)
                    elif isinstance(inner, torch.optim.SGD) and group["momentum"]:
                        inner.state[param].setdefault("momentum_buffer", torch.zeros_like(param.data))
        if offloaded:
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def without_classes(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Return the optimizer's saved state without classes: only plain values are read back."""
    for groups in saved_groups(tree):
        for group in groups:
            for name in _CLASSES:
                group.pop(name, None)
    return tree


def _step_device(group: dict[str, Any], param: torch.Tensor) -> torch.device:
    return param.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


@contextmanager
def loading(optimizer: Any, saved: Sequence[Any], scheduler: Any) -> Iterator[None]:
    """Surround the optimizer's `load_state_dict` with this.

    saved: the parameter groups of each optimizer in the checkpoint.
    scheduler: may have the parameter groups keep the limits of this run's learning rate and weight decay.
    """
    keeps_schedule = getattr(scheduler, "override_opt_param_scheduler", False)
    names = _OF_THE_MACHINE + (_OF_THE_SCHEDULE if keeps_schedule else ())
    kept = [
        [{name: group[name] for name in names if name in group} for group in part.optimizer.param_groups]
        for part in parts_of(optimizer)
    ]
    sharded = [part for part in parts_of(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in sharded:
        part._set_main_param_and_optimizer_states = partial(_set_all_but_step, part)
    try:
        current = (part.optimizer.param_groups for part in parts_of(optimizer))
        with found_by_kind(*current, *saved):
            yield
    finally:
        for part in sharded:
            del part._set_main_param_and_optimizer_states
    for part, groups in zip(parts_of(optimizer), kept, strict=True):
        for group, values in zip(part.optimizer.param_groups, groups, strict=True):
            group.update(values)
        if not isinstance(inner := part.optimizer, torch.optim.Adam):
            continue
        for group in inner.param_groups:
            group.pop("step", None)  # Megatron's copy, which would not advance
            for param in group["params"]:
                step = torch.as_tensor(inner.state[param].get("step", 0.0), dtype=torch.float32)
                inner.state[param]["step"] = step.clone().to(_step_device(group, param))


@contextmanager
def adopting_moments(optimizer: Any) -> Iterator[None]:
    """Let Transformer Engine's Adam take over the moments that Megatron-Core has made to load into.

    Its own loader makes tensors of the same type once more and copies: both sets are held until the load ends. torch's
    takes what has the type and device of its parameter. Only for moments and parameters in fp32, on the GPU.
    """
    changed = [part.optimizer for part in parts_of(optimizer) if _holds_plain_moments(part)]
    for inner in changed:
        inner.load_state_dict = partial(_load_plain_moments, inner, inner.load_state_dict)
    try:
        yield
    finally:
        for inner in changed:
            del inner.load_state_dict


def _load_plain_moments(inner: torch.optim.Optimizer, own: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
    states = state_dict["state"].values()
    is_plain = all({*state} == {*_MOMENTS} and {each.dtype for each in state.values()} == _FP32 for state in states)
    if states and is_plain:
        torch.optim.Optimizer.load_state_dict(inner, state_dict)
    else:
        own(state_dict)


def _holds_plain_moments(part: Any) -> bool:
    """Return whether an optimizer is Transformer Engine's Adam, sharded by Megatron-Core, with everything in fp32."""
    inner: Any = part.optimizer
    adam = fused_adam()
    if adam is None or adam not in type(inner).__mro__ or not hasattr(part, "shard_fp32_from_float16_groups"):
        return False
    others = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    if any(getattr(part.config, name, False) for name in others) or part.ddp_config.use_megatron_fsdp:
        return False
    if inner.master_weights or getattr(inner, "store_param_remainders", False):
        return False
    types = {inner.name_to_dtype_map.get(name) for name in _MOMENTS}
    return types | {param.dtype for group in inner.param_groups for param in group["params"]} == _FP32


def _set_all_but_step(part: DistributedOptimizer, model_param: Any, tensors: dict[str, Any]) -> None:
    group_index, group_order = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group_index]["params"][group_order]]
    step = state.pop("step", None)
    DistributedOptimizer._set_main_param_and_optimizer_states(part, model_param, tensors)
    if step is not None:
        state["step"] = step


*_SAME, _EXPERT = KIND  # whether it holds experts may differ


def regrouped_common(directory: str, optimizer: Any | None) -> dict[str, Any]:
    """Return the common part, fitted to the optimizer that will load it; without optimizer state if it is None.

    Megatron-Core keeps the experts' parameters in an optimizer of its own while they are spread over ranks (ep > 1),
    and in the common one otherwise. Tensors are saved by name and fit both; the groups have to be moved.
    """
    common = read_common(directory)
    saved = common.pop("optimizer", None)
    if optimizer is None or saved is None:
        return common
    parts, entries, groups = _parts(optimizer), _entries(saved), saved_groups(saved)
    kinds = [
        "distributed" if "param_state_sharding_type" in entry else "mixed" if "optimizer" in entry else "fp32"
        for entry in entries
    ]
    there = [(kind, [kind_of(group) for group in of_one]) for kind, of_one in zip(kinds, groups, strict=True)]
    # Without groups it was saved per rank, for this one layout
    if there != [_shape(part) for part in parts] and any(groups):
        entries = _moved(entries, parts, directory)
        saved = entries[0] if len(parts) == 1 else dict(enumerate(entries))
    common["optimizer"] = saved
    for entry, part in zip(entries, parts, strict=True):
        # Megatron omits a number of steps of 0, and torch's Adam needs it
        if _shape(part)[0] != "distributed" and isinstance(part.optimizer, torch.optim.Adam):
            entry.get("optimizer", entry).setdefault("state", {}).setdefault("common_step", torch.zeros(()))
    return common


def _moved(entries: list[dict[str, Any]], parts: list[Any], path: str) -> list[dict[str, Any]]:
    """Return the entries that Megatron would have saved for `parts`."""
    groups = [group for entry in entries for group in _groups(entry)]
    step = next(_steps(entries), 0)
    scaler = next((entry["grad_scaler"] for entry in entries if "grad_scaler" in entry), None)
    moved = []
    for part in parts:
        wanted = [_match(group, groups, path) for group in part.optimizer.param_groups]
        kind, _ = _shape(part)
        if kind == "distributed":
            inner: dict[str, Any] = {"param_groups": [{**group, "step": float(step)} for group in wanted]}
            entry: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
        else:
            inner = {"state": {"common_step": step}, "param_groups": wanted}
            entry = {"optimizer": inner} if kind == "mixed" else inner
        moved.append(entry if scaler is None or kind == "fp32" else {**entry, "grad_scaler": scaler})
    return moved


def _steps(entries: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield the number of steps, as each kind of optimizer keeps it."""
    for entry in entries:
        yield from (group["step"] for group in _groups(entry) if "step" in group)
        state = entry.get("optimizer", entry).get("state", {})
        if "common_step" in state:
            yield state["common_step"]


def _entries(saved: dict[Any, Any]) -> list[dict[str, Any]]:
    return [saved[i] for i in sorted(saved)] if all(isinstance(key, int) for key in saved) else [saved]


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def saved_groups(saved: dict[Any, Any]) -> list[list[dict[str, Any]]]:
    """Return the parameter groups of each optimizer in a checkpoint."""
    return [_groups(entry) for entry in _entries(saved)]


def _groups(entry: dict[str, Any]) -> list[dict[str, Any]]:
    inner = entry.get("optimizer", entry)
    inner = getattr(inner, "data", inner)  # saved by rank, for this one layout
    return list(inner.get("param_groups", []))


def _shape(part: Any) -> Any:
    is_distributed, is_mixed = isinstance(part, DistributedOptimizer), isinstance(part, MixedPrecisionOptimizer)
    kind = "distributed" if is_distributed else "mixed" if is_mixed else "fp32"
    return kind, [kind_of(group) for group in part.optimizer.param_groups]


def _match(current: dict[str, Any], groups: list[dict[str, Any]], path: str) -> dict[str, Any]:
    exact = [group for group in groups if kind_of(group) == kind_of(current)]
    similar = exact or [group for group in groups if kind_of(group)[: len(_SAME)] == kind_of(current)[: len(_SAME)]]
    if not similar:
        raise CheckpointError(f"{path}: has no parameter group with {dict(zip(KIND, kind_of(current), strict=True))}")
    kept = {key: value for key, value in similar[0].items() if key not in ("step", "params")}
    return {**kept, _EXPERT: current[_EXPERT]}


def _like(loaded: Any, current: Any) -> Any:
    """Return the value loaded for `current`, as a DTensor if `current` is a DTensor."""
    if not isinstance(current, DTensor) or not torch.is_tensor(loaded) or isinstance(loaded, DTensor):
        return loaded
    local = current.to_local()
    if loaded.shape != local.shape:  # fewer rows than ranks: Megatron-Core saves all of them on each rank
        parts = loaded.chunk(current.device_mesh.size())
        rank = current.device_mesh.get_local_rank()
        loaded = parts[rank] if rank < len(parts) else loaded[:0]
    return DTensor.from_local(
        loaded.to(local.dtype),
        current.device_mesh,
        current.placements,
        run_check=False,
        shape=current.shape,
        stride=current.stride(),
    )


def weights_like(loaded: dict[str, Any], chunk: torch.nn.Module) -> dict[str, Any]:
    """Return the loaded weights of a chunk in the form of its parameters."""
    current = dict(chunk.named_parameters())
    return {key: _like(value, current.get(key)) for key, value in loaded.items()}


@contextmanager
def states_like_parameters(optimizer: Any) -> Iterator[None]:
    """Give the optimizers that load inside `with` states in the form of their parameters."""

    def convert(inner: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        for group, theirs in zip(inner.param_groups, saved["param_groups"], strict=True):
            for param, number in zip(group["params"], theirs["params"], strict=True):
                state = saved["state"].get(number, {})
                state.update({key: _like(value, param) for key, value in state.items() if key != "step"})

    def load(part: Any, usual: Callable[[Any], None], saved: dict[str, Any]) -> None:
        """Convert the main parameters in 16 bits, which Megatron-Core copies one by one."""
        key = next(key for key in ("fp32_from_fp16_params", "fp32_from_fp16") if key in saved)
        pairs = zip(part.fp32_from_float16_groups, saved[key], strict=True)
        saved[key] = [[_like(value, param) for param, value in zip(*pair, strict=True)] for pair in pairs]
        usual(saved)

    hooks = [part.optimizer.register_load_state_dict_pre_hook(convert) for part in parts_of(optimizer)]
    in_16_bits = [part for part in parts_of(optimizer) if hasattr(part, "fp32_from_float16_groups")]
    for part in in_16_bits:
        part.load_state_dict = partial(load, part, part.load_state_dict)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for part in in_16_bits:
            del part.load_state_dict
