"""Checkpoint directories, named as in Megatron-Bridge: complete ones, the one to load, and those to keep.

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
import os
import re
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import CheckpointError

RUN_CONFIG = "run_config.yaml"
TRAIN_STATE = "train_state.pt"
FSDP_DTENSOR = "fsdp_dtensor"  # Megatron-FSDP's format
LATEST_TRAIN_STATE = "latest_train_state.pt"
LATEST_ITERATION = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_ASIDE = ".replaced"  # suffix of a checkpoint while another is saved in its place


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
        tracker = root / LATEST_TRAIN_STATE
        with zipfile.ZipFile(tracker) as archive:
            if archive.testzip() is None:
                return int(torch.load(tracker, weights_only=True)["step"])
    try:
        return int((root / LATEST_ITERATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def checkpoint_exists(path: str | None) -> bool:
    """Return whether `path` holds something to load: a complete checkpoint, or a tracker that names one."""
    if path is None:
        return False
    return has_tracker(Path(path)) or bool(saved_iterations(Path(path)))


@dataclass
class Found:
    """A checkpoint to load. weights_only: take the model's weights, begin at iteration 0. notes: lines to print.

    directory: "" if there is nothing to load, which is not an error. is_chosen: by the trackers, not by its name: an
    earlier one may take its place.
    """

    directory: str
    weights_only: bool = False
    is_persistent: bool = True
    is_chosen: bool = False
    notes: list[str] = field(default_factory=list)


def find_checkpoint(config: CheckpointConfig, *, adapters_only: bool = False) -> Found:
    """Return the checkpoint to load. `load`, or a newer non-persistent checkpoint, wins over `pretrained_checkpoint`.

    Rank 0 only; the result is broadcast. adapters_only: the weights of `pretrained_checkpoint` are loaded already.
    Raises CheckpointError: a checkpoint requested by name is missing or incomplete.
    """
    if (resume := _to_resume(config)) is not None:
        resume.weights_only = config.finetune
        return resume
    if config.pretrained_checkpoint is not None and not adapters_only:
        return pretrained(config)
    if config.load is None:
        return Found("")
    if config.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"{config.load}: no checkpoint found, and checkpoint.exit_on_missing_checkpoint is set; "
            "correct checkpoint.load, or remove it to start from scratch"
        )
    root = Path(config.load)
    if root.is_file():
        raise CheckpointError(f"{root}: is a file; checkpoint.load has to be a directory")
    is_own = config.save is not None and Path(config.save).absolute() == root.absolute()
    is_foreign = root.is_dir() and not has_tracker(root) and not saved_iterations(root, complete=False)
    # Starting from scratch next to other files would hide a wrong path
    if not is_own and is_foreign and (names := sorted(path.name for path in root.iterdir())):
        raise CheckpointError(
            f"{root}: is not a checkpoint directory (it holds {', '.join(names[:3])}{', ...' if names[3:] else ''}); "
            "checkpoint.load has to be a directory that checkpoint.save wrote"
        )
    return Found("", notes=[f"WARNING: no checkpoint found in {config.load}: training starts from scratch"])


def _to_resume(config: CheckpointConfig) -> Found | None:
    if config.load is None:
        return None
    root = Path(config.load)
    restore(root)
    if config.ckpt_step is not None:
        directory = Path(get_checkpoint_name(str(root), config.ckpt_step))
        if is_complete(directory):
            return Found(str(directory))
        there = ", ".join(map(str, saved_iterations(root))) or "none"
        state = "is not complete" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"{directory}: checkpoint.ckpt_step = {config.ckpt_step} {state}; complete checkpoints there: {there}"
        )
    if is_complete(root):
        return Found(str(root))
    if is_sharded_checkpoint(root):
        raise CheckpointError(
            f"{root}: holds weights but no train_state.pt to resume from; use it as checkpoint.pretrained_checkpoint"
        )
    found = latest(root) if checkpoint_exists(config.load) else None
    second = non_persistent_root(config, config.load)
    if config.non_persistent_ckpt_type != "global" or config.finetune or not checkpoint_exists(str(second)):
        return found
    if found is not None and not saved_iterations(second):
        found.notes.append(f"WARNING: {second}: holds no complete checkpoint; loading the persistent one")
        return found
    temporary = latest(second)
    temporary.is_persistent = False
    if found is None:
        return temporary
    return max(found, temporary, key=lambda each: iteration_of(Path(each.directory)) or 0)


def latest(root: Path) -> Found:
    """Return the checkpoint under `root` that the trackers name, or the newest complete one if it is not complete.

    Raises CheckpointError: none is complete.
    """
    complete, tracked = saved_iterations(root), tracked_iteration(root)
    if tracked in complete:
        return Found(get_checkpoint_name(str(root), tracked), is_chosen=True)
    named = "no readable iteration"
    if tracked is not None:
        files = (".metadata", "metadata.json", TRAIN_STATE)
        lacks = [name for name in files if not Path(get_checkpoint_name(str(root), tracked), name).is_file()]
        named = f"iteration {tracked}, which is not complete (missing: {', '.join(lacks)})"
    if not complete:
        raise CheckpointError(
            f"{root}: the trackers name {named}, and no other checkpoint in Megatron-Core's torch_dist format is "
            "complete there; remove the directory to start from scratch, or point checkpoint.load elsewhere"
        )
    note = f"WARNING: {root}: the trackers name {named}; loading the newest complete checkpoint, {complete[-1]}"
    return Found(get_checkpoint_name(str(root), complete[-1]), is_chosen=True, notes=[note])


def pretrained(config: CheckpointConfig) -> Found:
    """Return the initial weights. Raises CheckpointError: they are missing."""
    path = Path(str(config.pretrained_checkpoint))
    for directory in (path, Path(get_checkpoint_name(str(path), 0, release=True))):
        if is_sharded_checkpoint(directory):
            return Found(str(directory), weights_only=True)
    if not checkpoint_exists(str(path)):
        raise CheckpointError(
            f"{path}: checkpoint.pretrained_checkpoint holds no complete checkpoint in the torch_dist format"
        )
    found = latest(path)
    found.weights_only, found.is_chosen = True, False  # others would be another model
    return found


def before(found: Found, config: CheckpointConfig) -> Found | None:
    """Return the newest complete checkpoint before one that is damaged; None if there is none, or it was named."""
    if not found.is_chosen or config.load is None:
        return None
    root, newest = Path(found.directory).parent, iteration_of(Path(found.directory)) or 0
    earlier = [(iteration, root) for iteration in saved_iterations(root) if iteration < newest]
    if not found.is_persistent:
        earlier += [(i, Path(config.load)) for i in saved_iterations(Path(config.load)) if i <= newest]
    if not earlier:
        return None
    iteration, where = max(earlier)
    is_persistent = found.is_persistent or where != root
    name = get_checkpoint_name(str(where), iteration)
    return Found(name, found.weights_only, is_persistent=is_persistent, is_chosen=True)


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


def remove_old(config: CheckpointConfig, root: Path, current: int, previous: int | None) -> None:
    """Remove checkpoints not kept by the configuration, after `current` has replaced `previous` as the latest."""
    interval = config.save_retain_interval
    if interval and previous is not None and previous < current and previous % interval:
        _remove(root, previous)
    if config.most_recent_k is not None and config.most_recent_k > 0:
        keep_most_recent(root, current, config.most_recent_k)


def _remove(root: Path, iteration: int) -> None:
    """Remove a checkpoint, the completeness markers first: a partial checkpoint is never taken for a complete one."""
    directory = Path(get_checkpoint_name(str(root), iteration))
    for name in (TRAIN_STATE, "metadata.json"):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def move_aside(directory: Path) -> None:
    """Make an empty `directory`; set a complete checkpoint in it aside, and remove the leftovers of a killed save."""
    restore(directory.parent)
    if is_complete(directory):
        os.replace(directory, directory.with_name(directory.name + _ASIDE))
    elif directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def drop(directory: Path) -> None:
    """Remove the checkpoint set aside for `directory`, which is complete now."""
    shutil.rmtree(directory.with_name(directory.name + _ASIDE), ignore_errors=True)


def restore(root: Path) -> None:
    """Put back under `root` the checkpoints set aside for saves that never finished."""
    for aside in root.glob(f"iter_*{_ASIDE}"):
        directory = aside.with_name(aside.name.removesuffix(_ASIDE))
        if is_complete(directory) or not is_complete(aside):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(aside, directory)
