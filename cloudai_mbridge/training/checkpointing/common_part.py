"""Read what is the same on all ranks, with the optimizer's parameter groups arranged as this run has them.

Megatron-Core keeps the experts' parameters in an optimizer of its own while they are spread over ranks (ep > 1), and in
the common one otherwise. Tensors are saved under the parameters' names and fit both; the groups have to be moved.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from cloudai_mbridge.training.checkpointing.errors import CheckpointError
from cloudai_mbridge.training.checkpointing.verify import read_common
from cloudai_mbridge.training.compat.optimizer_groups import KIND, kind_of

*_SAME, _EXPERT = KIND  # whether it holds experts may differ
_RESHARDABLE = "fully_reshardable"


def regrouped_common(directory: str, optimizer: Any | None) -> dict[str, Any]:
    """Return the common part, fitted to the optimizer that is going to load it; without its part if there is none."""
    common = read_common(directory)
    saved = common.pop("optimizer", None)
    if optimizer is not None and saved is not None:
        common["optimizer"] = arranged = _arranged(saved, optimizer, directory)
        _add_missing_steps(arranged, optimizer)
    return common


def _entries(saved: dict[Any, Any]) -> list[dict[str, Any]]:
    return [saved[i] for i in sorted(saved)] if all(isinstance(key, int) for key in saved) else [saved]


def _parts(optimizer: Any) -> list[Any]:
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def _add_missing_steps(saved: dict[Any, Any], optimizer: Any) -> None:
    """Put back the number of steps where it was 0: Megatron leaves it out, and torch's Adam wants it."""
    for entry, part in zip(_entries(saved), _parts(optimizer), strict=True):
        if _shape(part)[0] != "distributed" and isinstance(part.optimizer, torch.optim.Adam):
            entry.get("optimizer", entry).setdefault("state", {}).setdefault("common_step", torch.zeros(()))


def _arranged(saved: dict[Any, Any], optimizer: Any, path: str) -> Any:
    parts, entries = _parts(optimizer), _entries(saved)
    if [_shape_of_saved(entry) for entry in entries] == [_shape(part) for part in parts]:
        return saved
    groups = [group for entry in entries for group in _groups(entry)]
    if not groups:  # saved per rank, for this one layout
        return saved
    step = next(_steps(entries), 0)
    scaler = next((entry["grad_scaler"] for entry in entries if "grad_scaler" in entry), None)
    arranged = [_entry(part, groups, step, scaler, path) for part in parts]
    return arranged[0] if len(parts) == 1 else dict(enumerate(arranged))


def _groups(entry: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = entry.get("optimizer", entry).get("param_groups", [])
    return groups


def _steps(entries: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield the number of steps that were made, from wherever the kinds of optimizer keep it."""
    for entry in entries:
        yield from (group["step"] for group in _groups(entry) if "step" in group)
        state = entry.get("optimizer", entry).get("state", {})
        if "common_step" in state:
            yield state["common_step"]


def _shape_of_saved(entry: dict[str, Any]) -> Any:
    kind = "distributed" if "param_state_sharding_type" in entry else "mixed" if "optimizer" in entry else "fp32"
    return kind, [kind_of(group) for group in _groups(entry)]


def _shape(part: Any) -> Any:
    is_distributed, is_mixed = isinstance(part, DistributedOptimizer), isinstance(part, MixedPrecisionOptimizer)
    kind = "distributed" if is_distributed else "mixed" if is_mixed else "fp32"
    return kind, [kind_of(group) for group in part.optimizer.param_groups]


def _entry(part: Any, groups: list[dict[str, Any]], step: Any, scaler: Any, path: str) -> dict[str, Any]:
    """Return what Megatron would have saved for `part`."""
    wanted = [_match(group, groups, path) for group in part.optimizer.param_groups]
    kind, _ = _shape(part)
    if kind == "distributed":
        value = float(step)
        inner: dict[str, Any] = {"param_groups": [{**group, "step": value} for group in wanted]}
        entry: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": _RESHARDABLE}
    else:
        inner = {"state": {"common_step": step}, "param_groups": wanted}
        entry = {"optimizer": inner} if kind == "mixed" else inner
    return entry if scaler is None or kind == "fp32" else {**entry, "grad_scaler": scaler}


def _match(current: dict[str, Any], groups: list[dict[str, Any]], path: str) -> dict[str, Any]:
    exact = [group for group in groups if kind_of(group) == kind_of(current)]
    similar = exact or [group for group in groups if kind_of(group)[: len(_SAME)] == kind_of(current)[: len(_SAME)]]
    if not similar:
        raise CheckpointError(f"{path}: has no parameter group with {dict(zip(KIND, kind_of(current), strict=True))}")
    kept = {key: value for key, value in similar[0].items() if key not in ("step", "params")}
    return {**kept, _EXPERT: current[_EXPERT]}
