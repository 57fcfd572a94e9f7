"""When to save, and when to leave."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

import torch.distributed as dist

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.checkpointing import CheckpointSaveContext, save_checkpoint
from cloudai_mbridge.training.loop.param_hooks import without_forward_pre_hooks
from cloudai_mbridge.training.process.device import largest
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.reporting.progress_log import compute_throughputs_and_append_to_progress_log
from cloudai_mbridge.training.resilience import fault_tolerance
from cloudai_mbridge.training.resilience.nvrx_straggler import check_nvrx_straggler_detection
from cloudai_mbridge.training.state import GlobalState


class EarlyExit(SystemExit):
    """The loop leaves, on all ranks at the same place; any other `SystemExit` may be one rank's alone."""


def barrier_and_log(message: str) -> None:
    """Wait for all ranks, then log the message on rank 0, with the time."""
    if dist.is_initialized():
        dist.barrier()
        if dist.get_rank() != 0:
            return
    write_line(f"[{message}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")


@contextmanager
def outside_step_time(state: GlobalState, stop_with_barrier: bool = False) -> Iterator[None]:
    """Exclude code inside `with` from the step time and the energy of the steps. A collective."""
    interval = state.timers("interval-time", log_level=0)
    was_running = interval._started
    if was_running:
        interval.stop(barrier=stop_with_barrier)
    if state.energy_monitor is not None:
        state.energy_monitor.pause()
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if state.energy_monitor is not None:
            state.energy_monitor.resume()
        if was_running:
            interval.start(barrier=not has_failed)  # a failed rank must not wait for the others


def save_checkpoint_and_time(
    state: GlobalState,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any],
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
) -> None:
    """Save a checkpoint, and report its duration, which does not count as step time. A collective."""
    key = "save-checkpoint-non-persistent" if non_persistent_ckpt else "save-checkpoint"
    cfg = state.cfg
    with outside_step_time(state, stop_with_barrier=True):
        with _timed(state, key), without_forward_pre_hooks(model):
            fault_tolerance.on_checkpointing_start(state)
            run = (state, model, optimizer, opt_param_scheduler)
            flops = num_floating_point_operations_so_far
            if state.checkpoint_manager is None:
                save_checkpoint(
                    *run,
                    flops,
                    checkpointing_context,
                    non_persistent_ckpt=non_persistent_ckpt,
                    train_data_iterator=train_data_iterator,
                )
            else:
                context = CheckpointSaveContext(*run, int(flops), train_data_iterator, non_persistent_ckpt)
                state.checkpoint_manager.save(context, state.callback_manager)
            fault_tolerance.on_checkpointing_end(is_async_finalization=False, global_state=state)
            if getattr(cfg.model, "fp8", None):
                gc.collect()  # the copies that Transformer Engine made of the parameters
        parts = {"optimizer": optimizer, "scheduler": opt_param_scheduler}
        if state.checkpoint_manager is None and not cfg.checkpoint.async_save:  # else when it is complete
            callbacks.fire("on_checkpoint_save", state.callback_manager, state, model, **parts)
        if non_persistent_ckpt:
            return
        state.last_saved_step = state.train_state.step
        if cfg.logger.log_progress:
            compute_throughputs_and_append_to_progress_log(state, num_floating_point_operations_so_far)


@contextmanager
def _timed(state: GlobalState, key: str) -> Iterator[None]:
    timer = state.timers(key, log_level=0)
    timer.start(barrier=True)
    try:
        yield
    except BaseException:
        timer.reset()  # no barrier: another rank may not come
        raise
    timer.stop(barrier=True)
    state.timers.log([key])


def checkpoint_and_decide_exit(
    state: GlobalState,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any],
    train_data_iterator: Any,
) -> bool:
    """Save a checkpoint if one is due; return whether to leave. All ranks call it, and all get the same answer."""
    checkpoint, step = state.cfg.checkpoint, state.train_state.step
    run = (model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context)
    save = partial(save_checkpoint_and_time, state, *run, train_data_iterator=train_data_iterator)
    is_saved = False  # by a checkpoint that outlives the job
    if state.exits_on_signal and state.signal_handler is not None and any(state.signal_handler.signals_received()):
        reason: str | None = "exiting program after receiving SIGTERM."
    else:
        if checkpoint.save and checkpoint.save_interval and step % checkpoint.save_interval == 0:
            save()
            is_saved = True
        elif checkpoint.save and (interval := checkpoint.non_persistent_save_interval) and step % interval == 0:
            save(non_persistent_ckpt=True)
        reason = _reason_to_leave(state)
    if reason is None:
        return False
    if checkpoint.save and not is_saved:
        save()
    barrier_and_log(reason)
    return True


def _reason_to_leave(state: GlobalState) -> str | None:
    train, step = state.cfg.train, state.train_state.step
    if train.exit_duration_in_mins is not None:
        minutes = (time.time() - state.start_time) / 60.0
        if is_over_on_any_rank(minutes, train.exit_duration_in_mins):
            return f"exiting program after {minutes} minutes"
    if train.exit_interval and step % train.exit_interval == 0:
        return f"exiting program at iteration {step}"
    if check_nvrx_straggler_detection(state.nvrx_straggler_manager):
        return "Exiting program due to straggler detection."
    return None


def is_over_on_any_rank(minutes: float, limit_minutes: float) -> bool:
    """Return whether any rank has passed the limit: their clocks differ. A collective."""
    return bool(largest(minutes > limit_minutes)[0])
