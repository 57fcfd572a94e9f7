"""The installed Transformer Engine, and its requirements on the environment.

Without it, Megatron-Core 0.16 has no version and its own test fails; newer releases report 0.0.0.
"""

import os
from typing import Any, cast

import torch
from megatron.core.utils import get_te_version, is_te_min_version

_TAKES_PICKLES = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def have_te() -> bool:
    """Return whether Transformer Engine can be imported."""
    version = get_te_version()
    return version is not None and str(version) != "0.0.0"


def te_is_at_least(version: str) -> bool:
    """Return whether Transformer Engine is installed in `version` or a later one."""
    return have_te() and bool(is_te_min_version(version))


def describe_te() -> str:
    """Return a description of the installation for error messages."""
    return f"{get_te_version()} is installed" if have_te() else "none is installed"


def load_weights(chunk: torch.nn.Module, weights: dict[str, Any], *, strict: bool) -> None:
    """Load a chunk's weights, and the state of delayed scaling, which takes two more steps with Transformer Engine.

    The state is a pickle, which releases since 2.20 refuse unless a variable is set. So is the rest of a checkpoint:
    who loads one trusts its source. A value of the variable from outside stays. And grouped experts with quantized
    weights load one expert's state before Megatron-Core's hook has put all of them together.
    """
    for name, module in chunk.named_modules():
        if f"{name}._extra_state1" in weights:
            for hook in module._load_state_dict_pre_hooks.values():
                hook(weights, f"{name}.", {}, strict, [], [], [])
    was_there = _TAKES_PICKLES in os.environ
    os.environ.setdefault(_TAKES_PICKLES, "1")
    try:
        chunk.load_state_dict(weights, strict=strict)
    finally:
        if not was_there:
            del os.environ[_TAKES_PICKLES]


def fused_adam() -> type | None:
    """Return Transformer Engine's Adam, None without it."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        return None
    return cast(type, FusedAdam)
