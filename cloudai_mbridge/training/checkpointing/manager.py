"""Checkpoint manager of the loop, under the names of Megatron-Bridge: a script can bring its own."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.checkpointing.async_save import maybe_finalize_async_save
from cloudai_mbridge.training.checkpointing.config_check import find_manager_class, init_checkpointing_context
from cloudai_mbridge.training.checkpointing.layout import checkpoint_exists, non_persistent_root
from cloudai_mbridge.training.checkpointing.load import load_checkpoint
from cloudai_mbridge.training.checkpointing.save import save_checkpoint
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig


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
    manager: CheckpointManager = find_manager_class(checkpoint_config.custom_manager_class)(checkpoint_config)
    return manager


def has_checkpoint(config: CheckpointConfig) -> bool:
    """Return whether the configured paths hold something to load: else a manager is not called."""
    places = [config.load, config.pretrained_checkpoint]
    if config.load is not None and config.non_persistent_ckpt_type == "global":
        places.append(str(non_persistent_root(config, config.load)))
    return any(checkpoint_exists(place) for place in places)
