"""Checkpoint manager of the loop, under the names of Megatron-Bridge (a script can bring its own), and the check of the
settings of checkpoints before anything starts."""

import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.checkpointing import hf_export, local
from cloudai_mbridge.training.checkpointing.layout import FSDP_DTENSOR, checkpoint_exists, non_persistent_root
from cloudai_mbridge.training.checkpointing.load import load_checkpoint
from cloudai_mbridge.training.checkpointing.save import maybe_finalize_async_save, save_checkpoint
from cloudai_mbridge.training.compat.checkpoints import HAS_HASHES
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.provenance import is_installed
from cloudai_mbridge.training.schema.packages import NVRX


@dataclass
class CheckpointSaveContext:
    """Arguments of a save. pg_collection, module_name: None; the groups are Megatron's own, and there is one model."""

    state: Any
    model: list[Any]
    optimizer: Any
    opt_param_scheduler: Any
    num_floating_point_operations_so_far: int
    train_data_iterator: Any = None
    non_persistent_ckpt: bool = False
    pg_collection: Any = None
    module_name: str | None = None


@dataclass
class CheckpointLoadContext:
    """Arguments of a load; strict and the rest as of `load_checkpoint`."""

    state: Any
    model: list[Any]
    optimizer: Any
    opt_param_scheduler: Any
    strict: bool = True
    skip_load_to_model_and_opt: bool = False
    pg_collection: Any = None
    module_name: str | None = None


@runtime_checkable
class CheckpointManager(Protocol):
    """Interface of `checkpoint.custom_manager_class`. Every rank makes one and calls it."""

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        """Take the section of the configuration."""

    def save(self, ctx: CheckpointSaveContext, callback_manager: callbacks.CallbackManager | None) -> None:
        """Save, and call the callbacks of `on_checkpoint_save` when that is done."""

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, float]:
        """Load into the run; return iteration and FLOPs so far, (0, 0) if nothing was loaded."""

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Complete saves in the background; called before every step, and at the end with `terminate`."""


class DefaultCheckpointManager:
    """Saves and loads with the functions of this package."""

    def __init__(self, checkpoint_config: CheckpointConfig) -> None:
        """Open the state shared by all saves and loads. A collective with replicated local checkpoints."""
        self.checkpoint_config = checkpoint_config
        self._context = init_checkpointing_context(checkpoint_config)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """State shared by all saves and loads."""
        return self._context

    def save(self, ctx: CheckpointSaveContext, callback_manager: callbacks.CallbackManager | None) -> None:
        """Save, as `save_checkpoint`. A collective."""
        save_checkpoint(
            ctx.state,
            ctx.model,
            ctx.optimizer,
            ctx.opt_param_scheduler,
            ctx.num_floating_point_operations_so_far,
            self._context,
            non_persistent_ckpt=ctx.non_persistent_ckpt,
            train_data_iterator=ctx.train_data_iterator,
        )
        if not self.checkpoint_config.async_save:  # else when it is complete
            parts = {"optimizer": ctx.optimizer, "scheduler": ctx.opt_param_scheduler}
            callbacks.fire("on_checkpoint_save", callback_manager, ctx.state, ctx.model, **parts)

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, float]:
        """Load, as `load_checkpoint`. A collective."""
        return load_checkpoint(
            ctx.state,
            ctx.model,
            ctx.optimizer,
            ctx.opt_param_scheduler,
            strict=ctx.strict,
            checkpointing_context=self._context,
            skip_load_to_model_and_opt=ctx.skip_load_to_model_and_opt,
        )

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Complete saves in the background, as `maybe_finalize_async_save`. A collective."""
        maybe_finalize_async_save(state, self.checkpoint_config, blocking=blocking, terminate=terminate)


def create_checkpoint_manager(checkpoint_config: CheckpointConfig) -> CheckpointManager:
    """Make the configured manager. Raises ConfigError: its class is missing, or is not a manager class."""
    if checkpoint_config.custom_manager_class is None:
        return DefaultCheckpointManager(checkpoint_config)
    manager: CheckpointManager = _find_manager_class(checkpoint_config.custom_manager_class)(checkpoint_config)
    return manager


def has_checkpoint(config: CheckpointConfig) -> bool:
    """Return whether the configured paths hold something to load: else a manager is not called."""
    places = [config.load, config.pretrained_checkpoint]
    if config.load is not None and config.non_persistent_ckpt_type == "global":
        places.append(str(non_persistent_root(config, config.load)))
    return any(checkpoint_exists(place) for place in places)


def check_checkpoint_packages(cfg: Any) -> None:
    """Check `cfg.checkpoint` against installed packages and supported settings. Any rank, no process group needed.

    Raises ConfigError: one line with every field, its value and a remedy.
    """
    c: CheckpointConfig = cfg.checkpoint
    problems: list[str] = []
    if c.ckpt_format not in ("torch_dist", FSDP_DTENSOR):
        problems.append(f"ckpt_format = {c.ckpt_format!r} is not supported; use 'torch_dist' or 'fsdp_dtensor'")
    if c.async_save and c.ckpt_format == FSDP_DTENSOR:
        problems.append("async_save = True is not supported with ckpt_format = 'fsdp_dtensor'; use False")
    if problem := _non_persistent_problem(c):
        problems.append(problem)
    if c.most_recent_k is not None and c.most_recent_k < 1 and c.most_recent_k != -1:
        problems.append(f"most_recent_k = {c.most_recent_k} keeps nothing; use at least 1, or -1 to keep all")
    if c.verify_integrity and c.ckpt_format == FSDP_DTENSOR:
        problems.append("verify_integrity = True needs ckpt_format = 'torch_dist'; use False")
    elif c.verify_integrity and not HAS_HASHES:
        problems.append("verify_integrity = True needs Megatron-Core 0.19 or newer; use False")
    unused = ("dist_ckpt_save_pre_mcore_014", "ckpt_convert_format")
    problems += [f"{name} = {value!r} is not supported; remove it" for name in unused if (value := getattr(c, name))]
    if c.custom_manager_class is not None:
        try:
            _find_manager_class(c.custom_manager_class)
        except ConfigError as error:
            problems.append(str(error).removeprefix("checkpoint."))
    if problems := [*problems, *hf_export.problems(cfg)]:
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


def _find_manager_class(path: str) -> Any:
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
    methods = ("save", "load", "finalize_async_saves")
    if missing := [each for each in methods if not callable(getattr(found, each, None))]:
        raise ConfigError(f"{where} has no method {', '.join(missing)}; see checkpointing.CheckpointManager")
    return found


def _non_persistent_problem(c: CheckpointConfig) -> str | None:
    kind = c.non_persistent_ckpt_type
    if kind == "local":
        if not is_installed(NVRX):
            return (
                "non_persistent_ckpt_type = 'local' needs the Python package nvidia-resiliency-ext, which is not "
                "installed: run `pip install nvidia-resiliency-ext` in the job's environment, or use 'global'"
            )
        if c.non_persistent_local_ckpt_dir is None:
            return (
                "non_persistent_ckpt_type = 'local' needs non_persistent_local_ckpt_dir: a directory on every machine"
            )
        if c.ckpt_format == FSDP_DTENSOR:
            return "non_persistent_ckpt_type = 'local' needs ckpt_format = 'torch_dist'; use 'global'"
        if c.replication and (c.replication_jump is None or min(c.replication_jump, c.replication_factor) < 1):
            return (
                "replication = True needs replication_jump and replication_factor of at least 1, got "
                f"{c.replication_jump} and {c.replication_factor}"
            )
        return None
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
