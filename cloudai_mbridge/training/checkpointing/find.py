"""Choose the checkpoint that a run begins from. Rank 0 only; the result is broadcast."""

from dataclasses import dataclass, field
from pathlib import Path

from cloudai_mbridge.training.checkpointing import layout
from cloudai_mbridge.training.checkpointing.retention import restore
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import CheckpointError


@dataclass
class Found:
    """A checkpoint to load. weights_only: take the model's weights, begin at iteration 0. notes: lines to print."""

    directory: str
    weights_only: bool = False
    is_persistent: bool = True
    notes: list[str] = field(default_factory=list)


@dataclass
class Nothing:
    """Nothing to load, which is not an error."""

    notes: list[str] = field(default_factory=list)


def find_checkpoint(config: CheckpointConfig, *, adapters_only: bool = False) -> Found | Nothing:
    """Return the checkpoint to load. `load`, or a newer non-persistent checkpoint, wins over `pretrained_checkpoint`.

    adapters_only: the weights of `pretrained_checkpoint` are loaded already.
    Raises CheckpointError: a checkpoint requested by name is missing or incomplete.
    """
    if (resume := _to_resume(config)) is not None:
        resume.weights_only = config.finetune
        return resume
    if config.pretrained_checkpoint is not None and not adapters_only:
        return pretrained(config)
    if config.load is None:
        return Nothing()
    if config.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"{config.load}: no checkpoint found, and checkpoint.exit_on_missing_checkpoint is set; "
            "correct checkpoint.load, or remove it to start from scratch"
        )
    _refuse_foreign(config)
    return Nothing([f"WARNING: no checkpoint found in {config.load}: training starts from scratch"])


def _to_resume(config: CheckpointConfig) -> Found | None:
    if config.load is None:
        return None
    root = Path(config.load)
    restore(root)
    if config.ckpt_step is not None:
        return _of_step(root, config.ckpt_step)
    if layout.is_complete(root):
        return Found(str(root))
    if layout.is_sharded_checkpoint(root):
        raise CheckpointError(
            f"{root}: holds weights but no train_state.pt to resume from; use it as checkpoint.pretrained_checkpoint"
        )
    found = latest(root) if layout.checkpoint_exists(config.load) else None
    second = layout.non_persistent_root(config, config.load)
    if config.non_persistent_ckpt_type != "global" or config.finetune or not layout.checkpoint_exists(str(second)):
        return found
    if found is not None and not layout.saved_iterations(second):
        found.notes.append(f"WARNING: {second}: holds no complete checkpoint; loading the persistent one")
        return found
    temporary = latest(second)
    temporary.is_persistent = False
    if found is None:
        return temporary
    return max(found, temporary, key=lambda each: layout.iteration_of(Path(each.directory)) or 0)


def latest(root: Path) -> Found:
    """Return the checkpoint under `root` that the trackers name, or the newest complete one if it is not complete.

    Raises CheckpointError: none is complete.
    """
    complete, tracked = layout.saved_iterations(root), layout.tracked_iteration(root)
    if tracked in complete:
        return Found(layout.get_checkpoint_name(str(root), tracked))
    named = "no readable iteration" if tracked is None else f"iteration {tracked}, which is not complete"
    if not complete:
        raise CheckpointError(
            f"{root}: the trackers name {named}, and no other checkpoint in Megatron-Core's torch_dist format is "
            "complete there; remove the directory to start from scratch, or point checkpoint.load elsewhere"
        )
    note = f"WARNING: {root}: the trackers name {named}; loading the newest complete checkpoint, {complete[-1]}"
    return Found(layout.get_checkpoint_name(str(root), complete[-1]), notes=[note])


def _of_step(root: Path, step: int) -> Found:
    directory = Path(layout.get_checkpoint_name(str(root), step))
    if layout.is_complete(directory):
        return Found(str(directory))
    there = ", ".join(map(str, layout.saved_iterations(root))) or "none"
    state = "is not complete" if directory.exists() else "does not exist"
    raise CheckpointError(f"{directory}: checkpoint.ckpt_step = {step} {state}; complete checkpoints there: {there}")


def pretrained(config: CheckpointConfig) -> Found:
    """Return the initial weights. Raises CheckpointError: they are missing."""
    path = Path(str(config.pretrained_checkpoint))
    for directory in (path, Path(layout.get_checkpoint_name(str(path), 0, release=True))):
        if layout.is_sharded_checkpoint(directory):
            return Found(str(directory), weights_only=True)
    if not layout.checkpoint_exists(str(path)):
        raise CheckpointError(
            f"{path}: checkpoint.pretrained_checkpoint holds no complete checkpoint in the torch_dist format"
        )
    found = latest(path)
    found.weights_only = True
    return found


def _refuse_foreign(config: CheckpointConfig) -> None:
    """Refuse a directory full of other files: starting from scratch next to them would hide a wrong path."""
    root = Path(str(config.load))
    if root.is_file():
        raise CheckpointError(f"{root}: is a file; checkpoint.load has to be a directory")
    is_own = config.save is not None and Path(config.save).absolute() == root.absolute()
    if is_own or not root.is_dir() or layout.has_tracker(root) or layout.saved_iterations(root, complete=False):
        return
    if names := sorted(path.name for path in root.iterdir()):
        raise CheckpointError(
            f"{root}: is not a checkpoint directory (it holds {', '.join(names[:3])}{', ...' if names[3:] else ''}); "
            "checkpoint.load has to be a directory that checkpoint.save wrote"
        )
