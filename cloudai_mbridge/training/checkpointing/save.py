"""Save a checkpoint: nothing but its last two writes, on rank 0 after every rank has finished, makes it the latest.

In the background Megatron-Core's queue of saves writes, for both strategies, "mcore" and "nvrx": a GPU rank hands its
tensors to a worker process; a CPU rank forks a process for each save, which keeps the old values while the optimizer
changes the parameters.
"""

import pickle
import queue
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.utils import unwrap_model

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.checkpointing import fsdp, hf_export, layout, local
from cloudai_mbridge.training.checkpointing.content import content_metadata, save_strategy, tree_to_save
from cloudai_mbridge.training.checkpointing.verify import FAILURES, on_each_rank, on_first_rank, one_line
from cloudai_mbridge.training.compat import checkpoints
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.config.text.serialization import resolved_yaml
from cloudai_mbridge.training.config.text.summary import print_rank_0
from cloudai_mbridge.training.errors import CheckpointError
from cloudai_mbridge.training.process.atomic import write_bytes, write_torch
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.reporting.progress_log import append_to_progress_log


def save_checkpoint(
    state: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any],
    pipeline_rank: int | None = None,
    tensor_rank: int | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    prebuilt_state_dict: dict[str, Any] | None = None,
) -> None:
    """Save the run as it is now. Every rank calls it, inside `cpu.megatron_device()`.

    With `checkpoint.async_save` the data is written in the background, and the checkpoint becomes the latest in a later
    call of `maybe_finalize_async_save`. A save that is still under way is waited for.

    pipeline_rank, tensor_rank: not used; every rank saves its own part. non_persistent_ckpt: save into the second
    stream, which keeps the newest only. preprocess_common_state_dict_fn: drops parts of the tree that differ between
    ranks, before they are compared. prebuilt_state_dict: saved instead of the other arguments' content.

    Raises CheckpointError: it cannot be written; on every rank.
    """
    config: CheckpointConfig = state.cfg.checkpoint
    maybe_finalize_async_save(state, config, blocking=True)
    metadata = content_metadata(config, state.cfg.peft)
    parts = (model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, train_data_iterator)
    completed = partial(callbacks.fire, "on_checkpoint_save", state.callback_manager, state, model)
    completed = partial(completed, optimizer=optimizer, scheduler=opt_param_scheduler)
    if non_persistent_ckpt and config.non_persistent_ckpt_type == "local":
        where = f"checkpoint.non_persistent_local_ckpt_dir = {config.non_persistent_local_ckpt_dir!r}"
        own = on_each_rank(where, lambda: tree_to_save(state, *parts, metadata))
        request = on_each_rank(where, lambda: local.save(config, checkpointing_context, own, state.train_state))
        text = f"  successfully saved local checkpoint from iteration {state.train_state.step:7d}"
        _conclude(state, request, partial(print_rank_0, text), completed)
        return
    directory, complete = _begin(state, non_persistent_ckpt)
    if config.ckpt_format == layout.FSDP_DTENSOR:
        fsdp.save(state, *parts, directory)
        complete()
        return
    tree = prebuilt_state_dict
    if tree is None:
        tree = on_each_rank(directory, lambda: tree_to_save(state, *parts, metadata))
    request = _write(config, tree, directory, checkpointing_context, metadata, preprocess_common_state_dict_fn)
    if getattr(state.cfg.model, "restore_modelopt_state", False):  # the modes of a converted model
        from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state

        bare = unwrap_model(model)
        with forked_results():
            on_each_rank(directory, lambda: save_sharded_modelopt_state(bare, directory, (config.ckpt_format, 1)))
    _conclude(state, request, complete, completed)
    if config.also_save_hf_checkpoint and model:
        on_each_rank(directory, lambda: hf_export.save(state.cfg, model, directory))


def _write(
    config: CheckpointConfig,
    tree: dict[str, Any],
    directory: str,
    context: dict[str, Any],
    metadata: dict[str, Any],
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> Any:
    """Write the tree, or return the request that does it in the background. A collective."""
    try:
        with nullcontext() if _uses_worker(config) else forked_results():
            return checkpoints.save(
                tree,
                directory,
                save_strategy(config, context),
                validate_access_integrity=not config.fully_parallel_save,  # that strategy checks it itself
                async_sharded_save=config.async_save,
                preprocess_common_before_consistancy_check=preprocess,
                content_metadata=metadata,
                **checkpoints.with_hashes(config.verify_integrity),
            )
    except FAILURES as error:  # Megatron raises it on every rank
        raise CheckpointError(f"{directory}: could not be written: {one_line(error)}") from error


def _conclude(state: Any, request: Any, complete: Callable[[], None], completed: Callable[[], None]) -> None:
    """Complete a checkpoint: at once, or with the request that writes it in the background."""
    if request is None:
        complete()
        return
    request.add_finalize_fn(complete)
    request.add_finalize_fn(lambda: state.completed_saves.append(completed))
    open_queue(state)
    with _clear_errors():
        state.async_calls_queue.schedule_async_request(request)


def _begin(state: Any, non_persistent: bool) -> tuple[str, Callable[[], None]]:
    """Return an empty directory, and the function that makes its checkpoint the latest once written: collectives.

    The function holds copies of its inputs: by then the run has continued.
    """
    config = state.cfg.checkpoint
    if config.save is None:
        raise CheckpointError("checkpoint.save = None: there is nowhere to save to; set a directory")
    root = layout.non_persistent_root(config, config.save) if non_persistent else Path(config.save)
    iteration = state.train_state.step
    directory = Path(layout.get_checkpoint_name(str(root), iteration))
    on_first_rank(partial(layout.move_aside, directory))
    train_state = {key: value.clone() for key, value in state.train_state.state_dict().items()}
    run_config = resolved_yaml(state.cfg) if dist.get_rank() == 0 else ""
    logs_completion = config.async_save and not non_persistent and state.cfg.logger.log_progress

    def complete() -> None:
        write_bytes(directory / layout.RUN_CONFIG, run_config.encode())
        write_torch(directory / layout.TRAIN_STATE, train_state)  # from here on it is complete
        previous = layout.tracked_iteration(root)
        write_torch(root / layout.LATEST_TRAIN_STATE, train_state)
        write_bytes(root / layout.LATEST_ITERATION, str(iteration).encode())
        layout.drop(directory)
        kind = "non-persistent " if non_persistent else ""
        write_line(f"  successfully saved {kind}checkpoint from iteration {iteration:7d} to {root}")
        if non_persistent:
            layout.keep_most_recent(root, iteration, 1)
        else:
            layout.remove_old(config, root, iteration, previous)
        if logs_completion:
            append_to_progress_log(str(root), f"Saved async checkpoint\tIteration: {iteration}", barrier=False)

    return str(directory), partial(on_first_rank, complete)


def _uses_worker(config: CheckpointConfig) -> bool:
    on_gpu = current_device().type != "cpu" if dist.is_initialized() else torch.cuda.is_available()
    return config.async_save and config.use_persistent_ckpt_worker and on_gpu


def open_queue(state: Any) -> None:
    """Create the queue unless it exists."""
    if state.async_calls_queue is None:
        if state.cfg.checkpoint.async_strategy == "nvrx" and (not dist.is_initialized() or dist.get_rank() == 0):
            write_line("checkpoint.async_strategy = 'nvrx' is done by Megatron-Core's own writer ('mcore')")
        state.async_calls_queue = AsyncCallsQueue(persistent=_uses_worker(state.cfg.checkpoint))


def maybe_finalize_async_save(
    global_state: Any, ckpt_cfg: CheckpointConfig, blocking: bool = False, terminate: bool = False
) -> None:
    """Complete the background saves that have finished. A collective.

    The callbacks of `on_checkpoint_save` are called for each of these. blocking: wait for all of them. terminate: end
    the worker as well; the run is over. Raises CheckpointError: a save failed, on any rank; raised on all of them.
    """
    saves = global_state.async_calls_queue
    if not ckpt_cfg.async_save or saves is None:
        return
    if blocking and saves.get_num_unfinalized_calls():
        print_rank_0("Unfinalized async checkpoint saves. Finalizing them synchronously now.")
    with _clear_errors():
        saves.maybe_finalize_async_calls(blocking=blocking, no_dist=False)
        if terminate:
            saves.close()
            global_state.async_calls_queue = None
    callbacks, global_state.completed_saves = global_state.completed_saves, []
    for callback in callbacks:  # not inside: a callback's error is not a failed save
        callback()


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except FAILURES as error:
        raise CheckpointError(f"the checkpoint that was being saved could not be written: {one_line(error)}") from error


class ForkedResults:
    """A queue for one item, between a process and those forked from it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the save)

    def put(self, item: Any) -> None:
        """Write the item; it is in the disk cache when this returns."""
        self._file.seek(0)
        pickle.dump(item, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Take the item. Raises queue.Empty: no item was written, or the process was killed while it wrote."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)  # noqa: S301 (our own file, which has no name)
        except (EOFError, pickle.UnpicklingError) as error:
            raise queue.Empty from error


def forked_results() -> AbstractContextManager[None]:
    """Let the saves that are prepared inside use `ForkedResults`."""
    return checkpoints.replaced(filesystem_async, checkpoints.RESULTS_QUEUE, ForkedResults)
