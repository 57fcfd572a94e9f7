"""Megatron-Bridge's names for what lies in a checkpoint's directory; the layout is in `checkpointing.layout`."""

from pathlib import Path
from typing import Any

import torch

from cloudai_mbridge.training.checkpointing.layout import (
    LATEST_ITERATION,
    RUN_CONFIG,
    TRAIN_STATE,
    checkpoint_exists,
    get_checkpoint_name,
    get_checkpoint_run_config_filename,
    get_checkpoint_train_state_filename,
)
from cloudai_mbridge.training.config.yaml_text import read_yaml
from cloudai_mbridge.training.state import TrainState

__all__ = [
    "CONFIG_FILE",
    "TRACKER_PREFIX",
    "TRAIN_STATE_FILE",
    "checkpoint_exists",
    "ensure_directory_exists",
    "file_exists",
    "get_checkpoint_name",
    "get_checkpoint_run_config_filename",
    "get_checkpoint_tracker_filename",
    "get_checkpoint_train_state_filename",
    "read_run_config",
    "read_train_state",
]
TRAIN_STATE_FILE, CONFIG_FILE, TRACKER_PREFIX = TRAIN_STATE, RUN_CONFIG, "latest"


def file_exists(path: str) -> bool:
    """Return whether there is a file or a directory at `path`."""
    return Path(path).exists()


def ensure_directory_exists(filename: str, check_parent: bool = True) -> None:
    """Make a directory: that of a file, or with check_parent=False the one named."""
    (Path(filename).parent if check_parent else Path(filename)).mkdir(parents=True, exist_ok=True)


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """Return the file that names the newest checkpoint's iteration."""
    return str(Path(checkpoints_path) / LATEST_ITERATION)


def read_run_config(run_config_filename: str) -> dict[str, Any]:
    """Read the configuration that a checkpoint was saved with, as plain data.

    Raises:
        ConfigError: broken YAML.
    """
    data: dict[str, Any] = read_yaml(Path(run_config_filename))
    return data


def read_train_state(train_state_filename: str) -> TrainState:
    """Read the progress counters of a checkpoint. On this rank alone: it is not a collective."""
    state = TrainState()
    state.load_state_dict(torch.load(train_state_filename, weights_only=True))
    return state
