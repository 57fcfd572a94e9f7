"""Names inside a checkpoint directory, as in Megatron-Bridge, and completeness of a checkpoint.

SAVE/
  iter_0000005/                         one checkpoint
    .metadata, metadata.json, *.distcp  Megatron-Core's distributed format; up to 0.18 with a common.pt;
                                        Megatron-FSDP's has no metadata.json
    run_config.yaml                     the configuration of the run
    train_state.pt                      progress counters; written last: without it the checkpoint is not complete
  latest_train_state.pt                 a copy of the newest checkpoint's train_state.pt
  latest_checkpointed_iteration.txt     its iteration
"""

import contextlib
import re
from pathlib import Path

import torch

from cloudai_mbridge.training.config.checkpoint import CheckpointConfig

RUN_CONFIG = "run_config.yaml"
TRAIN_STATE = "train_state.pt"
FSDP_DTENSOR = "fsdp_dtensor"  # Megatron-FSDP's format
LATEST_TRAIN_STATE = "latest_train_state.pt"
LATEST_ITERATION = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")


def get_checkpoint_name(checkpoints_path: str, iteration: int, release: bool = False) -> str:
    """Return the directory of one checkpoint; `release` is Megatron's name for weights without a run."""
    return str(Path(checkpoints_path) / ("release" if release else f"iter_{iteration:07d}"))


def get_checkpoint_train_state_filename(checkpoints_path: str, prefix: str | None = None) -> str:
    """Return the file of the progress counters: inside one checkpoint, or with prefix "latest" next to them all."""
    return str(Path(checkpoints_path) / (TRAIN_STATE if prefix is None else f"{prefix}_{TRAIN_STATE}"))


def get_checkpoint_run_config_filename(checkpoints_path: str) -> str:
    """Return the file that holds the configuration of the run that saved a checkpoint."""
    return str(Path(checkpoints_path) / RUN_CONFIG)


def non_persistent_root(config: CheckpointConfig, root: str) -> Path:
    """Return the directory of the second stream: the configured one, or one inside `root`."""
    return Path(config.non_persistent_global_ckpt_dir or Path(root) / "non_persistent")


def is_sharded_checkpoint(directory: Path) -> bool:
    """Return whether a directory holds all of Megatron-Core's own files: the last is written after the data."""
    return (directory / ".metadata").is_file() and ((directory / "metadata.json").is_file() or is_of_fsdp(directory))


def is_of_fsdp(directory: Path) -> bool:
    """Return whether a checkpoint was saved by Megatron-FSDP, whose format has no metadata.json."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if not (directory / "metadata.json").exists():
            return f"ckpt_format: {FSDP_DTENSOR}" in (directory / RUN_CONFIG).read_text(encoding="utf-8")
    return False


def is_complete(directory: Path) -> bool:
    """Return whether a save into `directory` has finished."""
    return is_sharded_checkpoint(directory) and (directory / TRAIN_STATE).is_file()


def iteration_of(directory: Path) -> int | None:
    """Return the iteration that a checkpoint directory is named after."""
    match = _ITERATION.fullmatch(directory.name)
    return int(match[1]) if match else None


def saved_iterations(root: Path, *, complete: bool = True) -> list[int]:
    """Return the iterations saved under `root`, in order; with complete=False, unfinished saves too."""
    if not root.is_dir():
        return []
    found = [(iteration_of(path), path) for path in root.iterdir() if path.is_dir()]
    return sorted(i for i, path in found if i is not None and (not complete or is_complete(path)))


def has_tracker(root: Path) -> bool:
    """Return whether a save under `root` has ever finished."""
    return (root / LATEST_TRAIN_STATE).is_file() or (root / LATEST_ITERATION).is_file()


def tracked_iteration(root: Path) -> int | None:
    """Return the iteration that the trackers name; None if they are missing or unreadable."""
    with contextlib.suppress(Exception):  # missing, cut off or foreign: the other tracker counts
        return int(torch.load(root / LATEST_TRAIN_STATE, weights_only=True)["step"])
    try:
        return int((root / LATEST_ITERATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def checkpoint_exists(path: str | None) -> bool:
    """Return whether `path` holds something to load: a complete checkpoint, or a tracker that names one."""
    if path is None:
        return False
    return has_tracker(Path(path)) or bool(saved_iterations(Path(path)))
