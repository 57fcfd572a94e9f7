"""Actions between two steps: readings, checks of the replicas' weights, garbage collection, checkpoints, exits."""

import gc
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.checkpointing import CheckpointSaveContext, save_checkpoint
from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.loop.param_hooks import without_forward_pre_hooks
from cloudai_mbridge.training.process.device import current_device, largest, synchronize
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.profiling import handle_profiling_stop
from cloudai_mbridge.training.reporting.progress_log import compute_throughputs_and_append_to_progress_log
from cloudai_mbridge.training.resilience import fault_tolerance
from cloudai_mbridge.training.resilience.straggler import check_nvrx_straggler_detection
from cloudai_mbridge.training.state import GlobalState


def learning_rates(optimizer: Any, config: ConfigContainer) -> tuple[float | None, float | None]:
    """Return (learning rate, that of the embedding and output layer if it is decoupled)."""
    usual = decoupled = None
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        if config.optimizer.decoupled_lr is not None and not group.get("default_config", True):
            decoupled = group["lr"]
        else:
            usual = group["lr"]
    return usual, decoupled


def loss_scale_of(optimizer: Any) -> float:
    """Return the optimizer's loss scale, 1 without one."""
    get_loss_scale = getattr(optimizer, "get_loss_scale", None)
    return 1.0 if get_loss_scale is None or getattr(optimizer, "is_stub_optimizer", False) else float(get_loss_scale())


def post_training_step_callbacks(
    model: list[Any],
    num_floating_point_operations_since_last_log_event: float,
    straggler_timer: Any,
    iteration: int,
    prof: Any,
    config: ConfigContainer,
    should_toggle_forward_pre_hook: bool,
    nsys_nvtx_context: Any = None,
) -> float:
    """Synchronise, report stragglers, compare the replicas' weights, stop profilers and collect garbage, if due.

    Returns the FLOPs since the straggler detector's last report: zero after one.
    """
    train = config.train
    if train.train_sync_interval and iteration % train.train_sync_interval == 0:
        synchronize()
    flops = num_floating_point_operations_since_last_log_event
    if iteration % config.logger.log_interval == 0 and config.straggler is not None and config.straggler.log_straggler:
        straggler_timer.report(flops, config.logger.log_interval)
        flops = 0.0
    interval = train.check_weight_hash_across_dp_replicas_interval
    if interval is not None and iteration % interval == 0:
        check_weights(model, iteration, should_toggle_forward_pre_hook)
    handle_profiling_stop(config.profiling, iteration, dist.get_rank(), prof, nsys_nvtx_context)
    if train.manual_gc and train.manual_gc_interval and iteration % train.manual_gc_interval == 0:
        gc.collect()
    return flops


def check_weights(model: list[Any], iteration: int, toggle_hooks: bool) -> None:
    """Leave the run if the replicas of a parameter differ. A collective. Raises AssertionError: they do."""
    with without_forward_pre_hooks(model) if toggle_hooks else nullcontext():
        assert check_param_hashes_across_dp_replicas(model), f"replicas have different weights at iteration {iteration}"
    dist.barrier()
    if dist.get_rank() == 0:
        write_line(f">>> Weight hashes match after {iteration} iterations...")


def check_param_hashes_across_dp_replicas(model: list[Any]) -> bool:
    """Return whether every parameter has the same bits on all its replicas. A collective over all ranks.

    Dense parameters are replicated over the data- and context-parallel ranks, experts over the expert-data-parallel
    ranks. Every rank gets the same answer; a rank that differs from its replica 0 prints the first names.
    Copies each parameter to the host: too slow for every step.
    """
    named = [(f"chunk {i}: {name}", param) for i, chunk in enumerate(model) for name, param in chunk.named_parameters()]
    dense = {name: param for name, param in named if getattr(param, "allreduce", True)}
    experts = {name: param for name, param in named if name not in dense}
    differing = _differing(dense, mpu.get_data_parallel_group(with_context_parallel=True))
    differing += _differing(experts, mpu.get_expert_data_parallel_group())
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        names = ", ".join(differing[:5])
        write_line(f"rank {dist.get_rank()}: weights differ from those of the first replica: {names}{more}")
    return not largest(bool(differing))[0]


def _differing(params: dict[str, Any], group: Any) -> list[str]:
    """Return the names of the parameters whose hash is not that of the group's first rank."""
    if not params or group.size() == 1:
        return []
    mine = torch.stack([_hash(param) for param in params.values()]).to(current_device())
    first = mine.clone()
    dist.broadcast(first, group=group, group_src=0)
    equal = (mine == first).all(1).tolist()
    return [name for name, is_equal in zip(params, equal, strict=True) if not is_equal]


def _hash(param: Any) -> torch.Tensor:
    """Hash data type, shape and bits (for FP8 and FP4, of the dequantized values) into a CPU tensor of bytes."""
    data: Any = quantized.values(param.detach()).cpu().contiguous()
    digest = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)}".encode(), digest_size=16)
    digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


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
