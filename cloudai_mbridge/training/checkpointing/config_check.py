"""Refuse unsupported checkpoint settings, before anything starts."""

import os
import sys
from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.training.checkpointing import hf_export, local
from cloudai_mbridge.training.checkpointing.layout import FSDP_DTENSOR
from cloudai_mbridge.training.compat.checkpoints import HAS_HASHES
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.provenance import is_installed
from cloudai_mbridge.training.resilience.packages import NVRX


def check_checkpoint_packages(cfg: Any) -> None:
    """Check `cfg.checkpoint` against installed packages and supported settings. Any rank, no process group needed.

    Raises ConfigError: one line with every field, its value and a remedy.
    """
    if problems := [*_problems(cfg.checkpoint), *hf_export.problems(cfg)]:
        raise ConfigError("; ".join(f"checkpoint.{problem}" for problem in problems))
    hf_export.check(cfg)


def init_checkpointing_context(checkpoint_config: CheckpointConfig) -> dict[str, Any]:
    """Return the dict that all saves and loads of a run share. A collective with replicated local checkpoints.

    Raises ConfigError: non-persistent checkpoints that cannot be saved.
    """
    if problem := _non_persistent_problem(checkpoint_config):
        raise ConfigError(f"checkpoint.{problem}")
    if checkpoint_config.non_persistent_ckpt_type != "local":
        return {}
    return {local.MANAGER: local.open_manager(checkpoint_config)}


def _problems(c: CheckpointConfig) -> Iterator[str]:
    if c.ckpt_format not in ("torch_dist", FSDP_DTENSOR):
        yield f"ckpt_format = {c.ckpt_format!r} is not supported; use 'torch_dist' or 'fsdp_dtensor'"
    if c.async_save and c.ckpt_format == FSDP_DTENSOR:
        yield "async_save = True is not supported with ckpt_format = 'fsdp_dtensor'; use False"
    if problem := _non_persistent_problem(c):
        yield problem
    if c.most_recent_k is not None and c.most_recent_k < 1 and c.most_recent_k != -1:
        yield f"most_recent_k = {c.most_recent_k} keeps nothing; use at least 1, or -1 to keep all"
    if c.verify_integrity and c.ckpt_format == FSDP_DTENSOR:
        yield "verify_integrity = True needs ckpt_format = 'torch_dist'; use False"
    elif c.verify_integrity and not HAS_HASHES:
        yield "verify_integrity = True needs Megatron-Core 0.19 or newer; use False"
    for name in ("dist_ckpt_save_pre_mcore_014", "ckpt_convert_format"):
        if value := getattr(c, name):
            yield f"{name} = {value!r} is not supported; remove it"
    if c.custom_manager_class is not None:
        try:
            find_manager_class(c.custom_manager_class)
        except ConfigError as error:
            yield str(error).removeprefix("checkpoint.")


def _local_problem(c: CheckpointConfig) -> str | None:
    if not is_installed(NVRX):
        return (
            "non_persistent_ckpt_type = 'local' needs the Python package nvidia-resiliency-ext, which is not installed:"
            " run `pip install nvidia-resiliency-ext` in the job's environment, or use 'global'"
        )
    if c.non_persistent_local_ckpt_dir is None:
        return "non_persistent_ckpt_type = 'local' needs non_persistent_local_ckpt_dir: a directory on every machine"
    if c.ckpt_format == FSDP_DTENSOR:
        return "non_persistent_ckpt_type = 'local' needs ckpt_format = 'torch_dist'; use 'global'"
    if c.replication and (c.replication_jump is None or min(c.replication_jump, c.replication_factor) < 1):
        return (
            f"replication = True needs replication_jump and replication_factor of at least 1, got {c.replication_jump}"
            f" and {c.replication_factor}"
        )
    return None


def find_manager_class(path: str) -> Any:
    """Return the checkpoint manager class at a dotted path. Nothing is imported: the program must have imported it.

    Raises ConfigError: it cannot be found, or lacks a method.
    """
    where = f"checkpoint.custom_manager_class = {path!r}"
    module, _, name = path.rpartition(".")
    if module not in sys.modules:
        raise ConfigError(f"{where}: {module or 'its module'!r} is not imported; import it in the script that trains")
    found = getattr(sys.modules[module], name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{where}: no such class")
    if missing := [each for each in _MANAGER_METHODS if not callable(getattr(found, each, None))]:
        raise ConfigError(f"{where} has no method {', '.join(missing)}; see checkpointing.CheckpointManager")
    return found


_MANAGER_METHODS = ("save", "load", "finalize_async_saves")


def _non_persistent_problem(c: CheckpointConfig) -> str | None:
    kind = c.non_persistent_ckpt_type
    if kind == "local":
        return _local_problem(c)
    if c.replication:
        return "replication = True needs non_persistent_ckpt_type = 'local'; remove it"
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
