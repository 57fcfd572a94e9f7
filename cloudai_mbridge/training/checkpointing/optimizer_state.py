"""What torch's own optimizers need around Megatron-Core's saving and loading of their state.

Megatron-Core 0.16 expects Transformer Engine's Adam, which counts its steps per parameter group. torch's Adam keeps a
step tensor per parameter, and with the distributed optimizer Megatron then (1) refuses a state without steps, (2) looks
for a step in the loaded parameter state, and (3) gives all parameters one shared step tensor, which torch advances once
per parameter. It also takes over flags of the machine that saved, such as `fused`. With Transformer Engine or Apex none
of this applies, and nothing is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from cloudai_mbridge.training.compat.optimizer_groups import found_by_kind

_OF_THE_MACHINE = ("fused", "foreach", "capturable", "differentiable")
_OF_THE_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


def parts_of(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers behind a chained one, without those that have nothing to train."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def ensure_state(optimizer: Any) -> None:
    """Give every parameter the state that it has before its first step: Megatron saves and loads into that."""
    for part in parts_of(optimizer):
        if getattr(part, "init_state_fn", None) is None:  # SGD: Megatron calls it all the same
            part.init_state_fn = lambda inner, config=None: None
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                _ensure_param_state(part.optimizer, group, param)


def _ensure_param_state(inner: Any, group: dict[str, Any], param: torch.Tensor) -> None:
    if isinstance(inner, torch.optim.Adam):  # AdamW is one too
        state = inner.state[param]
        state.setdefault("exp_avg", torch.zeros_like(param.data))
        state.setdefault("exp_avg_sq", torch.zeros_like(param.data))
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=_step_device(group, param)))
    elif isinstance(inner, torch.optim.SGD) and group["momentum"]:
        inner.state[param].setdefault("momentum_buffer", torch.zeros_like(param.data))


def _step_device(group: dict[str, Any], param: torch.Tensor) -> torch.device:
    return param.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


@contextmanager
def loading(optimizer: Any, saved: Sequence[Any], *, keep_schedule: bool) -> Iterator[None]:
    """Surround the optimizer's `load_state_dict` with this.

    saved: the parameter groups of each optimizer in the checkpoint.
    keep_schedule: the parameter groups keep the limits of this run's learning rate and weight decay.
    """
    names = _OF_THE_MACHINE + (_OF_THE_SCHEDULE if keep_schedule else ())
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
        if isinstance(part.optimizer, torch.optim.Adam):
            _own_steps(part.optimizer)


def _set_all_but_step(part: DistributedOptimizer, model_param: Any, tensors: dict[str, Any]) -> None:
    group_index, group_order = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group_index]["params"][group_order]]
    step = state.pop("step", None)
    DistributedOptimizer._set_main_param_and_optimizer_states(part, model_param, tensors)
    if step is not None:
        state["step"] = step


def _own_steps(inner: torch.optim.Optimizer) -> None:
    for group in inner.param_groups:
        group.pop("step", None)  # Megatron's copy, which would not advance
        for param in group["params"]:
            step = torch.as_tensor(inner.state[param].get("step", 0.0), dtype=torch.float32)
            inner.state[param]["step"] = step.clone().to(_step_device(group, param))
