"""Differences of a configuration from Megatron-Core's defaults."""

import os
import warnings
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer

_DOUBLE, _SINGLE = "=" * 70, "-" * 70
_OTHERS = ("train", "validation", "scheduler", "dataset", "checkpoint", "logger", "tokenizer", "rng")


def log_non_default_values(config: "ConfigContainer") -> None:
    """Print, on rank 0, the values that differ from Megatron-Core's defaults, then the values of the other sections."""
    lines = ["", _DOUBLE, "Configuration Summary (Non-Default Values vs Megatron Core)", _DOUBLE]
    bases = {"optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    for name, base in {**bases, "model": _get_mcore_transformer_parent(config.model)}.items():
        if changed := _get_non_default_values(getattr(config, name), base):
            lines += ["", f"[{name}] Non-default values (vs Mcore {base.__name__}):"]
            lines += [f"  {key}: {now!r}  (Mcore default: {was!r})" for key, (now, was) in sorted(changed.items())]
    lines += ["", _SINGLE, "Other Configuration Values:", _SINGLE]
    for name in _OTHERS:
        if values := _get_key_config_values(getattr(config, name)):
            lines += ["", f"[{name}]:", *(f"  {key}: {value!r}" for key, value in sorted(values.items()))]
    print_rank_0("\n".join([*lines, "", _DOUBLE]))


def _get_mcore_transformer_parent(model_config: Any) -> type:
    """Return the Megatron-Core class whose defaults a model config is measured against."""
    base: type = MLATransformerConfig if isinstance(model_config, MLATransformerConfig) else TransformerConfig
    return base


def _get_non_default_values(config_obj: Any, mcore_class: type) -> dict[str, tuple[Any, Any]]:
    """Return `{field: (value, default)}` of the fields that have a default in `mcore_class` and differ from it."""
    public = [f for f in fields(mcore_class) if not f.name.startswith("_")]
    defaults = {f.name: f.default for f in public if f.default is not MISSING}
    defaults |= {f.name: f.default_factory() for f in public if f.default_factory is not MISSING}
    pairs = {
        f.name: (getattr(config_obj, f.name, None), defaults[f.name]) for f in fields(config_obj) if f.name in defaults
    }
    return {
        name: (now, was)
        for name, (now, was) in pairs.items()
        if not callable(now) and not callable(was) and _differ(now, was)
    }


def _differ(now: Any, was: Any) -> bool:
    try:
        return bool(now != was)
    except (TypeError, ValueError, RuntimeError):  # a tensor has no single truth value, and some types do not compare
        return str(now) != str(was)


def _get_key_config_values(config_obj: Any) -> dict[str, Any]:
    """Return the public fields of a dataclass that are neither None nor callable; nothing for anything else."""
    if not is_dataclass(config_obj):
        return {}
    values = {f.name: getattr(config_obj, f.name, None) for f in fields(config_obj) if not f.name.startswith("_")}
    return {name: value for name, value in values.items() if value is not None and not callable(value)}


def print_rank_0(message: str) -> None:
    """Print on rank 0, or on the only process."""
    if _is_rank_0():
        print(f"{message}\n", end="", flush=True)  # in one write: torchrun's ranks share a stdout without buffers


def warn_rank_0(message: str) -> None:
    """Warn on rank 0, or on the only process."""
    if _is_rank_0():
        warnings.warn(message, UserWarning, stacklevel=3)


def _is_rank_0() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
