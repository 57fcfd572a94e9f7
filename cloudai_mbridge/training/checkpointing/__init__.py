"""Checkpoints in Megatron-Core's distributed format.

They hold pickles, and reading pickles runs code that they name: load checkpoints only from a source that you trust.
`common.pt` and the trackers are read as plain data.
"""

from typing import Any

from cloudai_mbridge.training.checkpointing.layout import (
    checkpoint_exists,
    get_checkpoint_name,
    get_checkpoint_run_config_filename,
    get_checkpoint_train_state_filename,
)
from cloudai_mbridge.training.checkpointing.load import load_checkpoint, load_pretrained
from cloudai_mbridge.training.checkpointing.manager import (
    CheckpointLoadContext,
    CheckpointManager,
    CheckpointSaveContext,
    DefaultCheckpointManager,
    check_checkpoint_packages,
    create_checkpoint_manager,
    init_checkpointing_context,
)
from cloudai_mbridge.training.checkpointing.save import maybe_finalize_async_save, save_checkpoint
from cloudai_mbridge.training.errors import CheckpointError
from cloudai_mbridge.training.upstream import missing

__all__ = [
    "CheckpointError",
    "CheckpointLoadContext",
    "CheckpointManager",
    "CheckpointSaveContext",
    "DefaultCheckpointManager",
    "check_checkpoint_packages",
    "checkpoint_exists",
    "create_checkpoint_manager",
    "get_checkpoint_name",
    "get_checkpoint_run_config_filename",
    "get_checkpoint_train_state_filename",
    "init_checkpointing_context",
    "load_checkpoint",
    "load_pretrained",
    "maybe_finalize_async_save",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
