"""Background saves: Megatron-Core's queue of saves, for both strategies, "mcore" and "nvrx".

A GPU rank hands its tensors to a worker process; a CPU rank forks a process for each save, which keeps the old values
while the optimizer changes the parameters.
"""

import pickle
import queue
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from cloudai_mbridge.training.checkpointing.agree import FAILURES, one_line
from cloudai_mbridge.training.compat import checkpoints
from cloudai_mbridge.training.config.checkpoint import CheckpointConfig
from cloudai_mbridge.training.errors import CheckpointError
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line


def uses_worker(config: CheckpointConfig) -> bool:
    """Return whether a worker process writes, not a forked one."""
    on_gpu = current_device().type != "cpu" if dist.is_initialized() else torch.cuda.is_available()
    return config.async_save and config.use_persistent_ckpt_worker and on_gpu


def schedule(state: Any, request: Any) -> None:
    """Begin a save in the background. A collective."""
    open_queue(state)
    with _clear_errors():
        state.async_calls_queue.schedule_async_request(request)


def open_queue(state: Any) -> None:
    """Create the queue unless it exists."""
    if state.async_calls_queue is None:
        if state.cfg.checkpoint.async_strategy == "nvrx" and (not dist.is_initialized() or dist.get_rank() == 0):
            write_line("checkpoint.async_strategy = 'nvrx' is done by Megatron-Core's own writer ('mcore')")
        state.async_calls_queue = AsyncCallsQueue(persistent=uses_worker(state.cfg.checkpoint))


def maybe_finalize_async_save(
    global_state: Any, ckpt_cfg: CheckpointConfig, blocking: bool = False, terminate: bool = False
) -> None:
    """Complete the background saves that have finished. A collective.

    The callbacks of `on_checkpoint_save` are called for each of these. blocking: wait for all of them. terminate: end
    the worker as well; the run is over. Raises CheckpointError: a save failed, on any rank; raised on all of them.
    """
    queue = global_state.async_calls_queue
    if not ckpt_cfg.async_save or queue is None:
        return
    if blocking and queue.get_num_unfinalized_calls() and dist.get_rank() == 0:
        write_line("Unfinalized async checkpoint saves. Finalizing them synchronously now.")
    with _clear_errors():
        queue.maybe_finalize_async_calls(blocking=blocking, no_dist=False)
        if terminate:
            queue.close()
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


@contextmanager
def forked_results() -> Iterator[None]:
    """Let the saves that are prepared inside use `ForkedResults`."""
    name = checkpoints.RESULTS_QUEUE
    original = getattr(filesystem_async, name)
    setattr(filesystem_async, name, ForkedResults)
    try:
        yield
    finally:
        setattr(filesystem_async, name, original)
