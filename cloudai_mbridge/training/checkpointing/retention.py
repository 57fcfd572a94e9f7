"""Retention of checkpoints, also while a checkpoint is saved again. Rank 0 only."""

import os
import shutil
from pathlib import Path

from cloudai_mbridge.training.checkpointing.layout import get_checkpoint_name, is_complete, saved_iterations
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig

_SUFFIX = ".replaced"


def keep_most_recent(root: Path, current: int, count: int) -> None:
    """Keep the `count` newest complete checkpoints under `root`, `current` among them.

    Older directories of killed saves are removed too. Newer directories stay: a run that went back to an earlier
    iteration must not remove the progress of another.
    """
    older = [i for i in saved_iterations(root) if i < current]
    kept = set(older[len(older) - (count - 1) :]) if count > 1 else set()
    for iteration in saved_iterations(root, complete=False):
        if iteration < current and iteration not in kept:
            _remove(root, iteration)


def apply(config: CheckpointConfig, root: Path, current: int, previous: int | None) -> None:
    """Remove checkpoints not kept by the configuration, after `current` has replaced `previous` as the latest."""
    interval = config.save_retain_interval
    if interval and previous is not None and previous < current and previous % interval:
        _remove(root, previous)
    if config.most_recent_k is not None and config.most_recent_k > 0:
        keep_most_recent(root, current, config.most_recent_k)


def _remove(root: Path, iteration: int) -> None:
    """Remove a checkpoint, the completeness markers first: a partial checkpoint is never taken for a complete one."""
    directory = Path(get_checkpoint_name(str(root), iteration))
    for name in ("train_state.pt", "metadata.json"):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def move_aside(directory: Path) -> None:
    """Make an empty `directory`; set a complete checkpoint in it aside, and remove the leftovers of a killed save."""
    restore(directory.parent)
    if is_complete(directory):
        os.replace(directory, _aside(directory))
    elif directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def drop(directory: Path) -> None:
    """Remove the checkpoint set aside for `directory`, which is complete now."""
    shutil.rmtree(_aside(directory), ignore_errors=True)


def restore(root: Path) -> None:
    """Put back under `root` the checkpoints set aside for saves that never finished."""
    for aside in root.glob(f"iter_*{_SUFFIX}"):
        directory = aside.with_name(aside.name.removesuffix(_SUFFIX))
        if is_complete(directory) or not is_complete(aside):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(aside, directory)


def _aside(directory: Path) -> Path:
    return directory.with_name(directory.name + _SUFFIX)
