"""Refuse what this package does not do, before anything starts."""

import os
from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.training.checkpointing.layout import FSDP_DTENSOR
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import ConfigError


def check_checkpoint_packages(cfg: Any) -> None:
    """Check `cfg.checkpoint` against what is installed and what can be done. Any rank, no process group needed.

    Raises ConfigError: one line with every field, its value and a remedy.
    """
    if problems := list(_problems(cfg.checkpoint)):
        raise ConfigError("; ".join(f"checkpoint.{problem}" for problem in problems))


def init_checkpointing_context(checkpoint_config: CheckpointConfig) -> dict[str, Any]:
    """Return the dict that all saves and loads of a run share. Raises ConfigError: local non-persistent checkpoints."""
    if problem := _non_persistent_problem(checkpoint_config):
        raise ConfigError(f"checkpoint.{problem}")
    return {}


def _problems(c: CheckpointConfig) -> Iterator[str]:
    if c.ckpt_format not in ("torch_dist", FSDP_DTENSOR):
        yield f"ckpt_format = {c.ckpt_format!r} is not supported; use 'torch_dist' or 'fsdp_dtensor'"
    if c.async_save and c.ckpt_format == FSDP_DTENSOR:
        yield "async_save = True is not supported with ckpt_format = 'fsdp_dtensor'; use False"
    if problem := _non_persistent_problem(c):
        yield problem
    if c.most_recent_k is not None and c.most_recent_k < 1 and c.most_recent_k != -1:
        yield f"most_recent_k = {c.most_recent_k} keeps nothing; use at least 1, or -1 to keep all"
    for name in ("replication", "custom_manager_class", "dist_ckpt_save_pre_mcore_014", "ckpt_convert_format"):
        if value := getattr(c, name):
            yield f"{name} = {value!r} is not supported; remove it"


def _non_persistent_problem(c: CheckpointConfig) -> str | None:
    kind = c.non_persistent_ckpt_type
    if kind == "local":
        return (
            "non_persistent_ckpt_type = 'local' needs the package nvidia-resiliency-ext, and is not supported here; "
            "use 'global', and non_persistent_global_ckpt_dir"
        )
    if kind == "in_memory":
        return "non_persistent_ckpt_type = 'in_memory' is not supported; use 'global'"
    second = c.non_persistent_global_ckpt_dir
    if c.save is not None and second is not None and os.path.realpath(second) == os.path.realpath(c.save):
        return (
            f"non_persistent_global_ckpt_dir = {second!r} is `save`, whose checkpoints would be removed: "
            "only the newest is kept there; use another directory"
        )
    if c.non_persistent_save_interval is not None and kind is None:
        return (
            f"non_persistent_save_interval = {c.non_persistent_save_interval} needs non_persistent_ckpt_type; "
            "use 'global'"
        )
    return None
