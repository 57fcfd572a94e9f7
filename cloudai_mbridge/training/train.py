"""The training loop. Names and order of actions follow Megatron-Bridge's `training.train`."""

import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.parallel_state import update_pg_timeout
from megatron.core.rerun_state_machine import get_rerun_state_machine

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.callbacks import CallbackManager
from cloudai_mbridge.training.checkpointing import maybe_finalize_async_save
from cloudai_mbridge.training.config.container import required
from cloudai_mbridge.training.eval import evaluate_and_print_results
from cloudai_mbridge.training.loop import graphs
from cloudai_mbridge.training.loop.between_steps import (
    EarlyExit,
    barrier_and_log,
    check_weights,
    checkpoint_and_decide_exit,
    learning_rates,
    loss_scale_of,
    outside_step_time,
    post_training_step_callbacks,
    save_checkpoint_and_time,
)
from cloudai_mbridge.training.loop.graphs import TrainingGraphs
from cloudai_mbridge.training.loop.param_hooks import (
    FirstStepHooks,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    has_forward_pre_hooks,
    should_disable_forward_pre_hook,
    without_forward_pre_hooks,
)
from cloudai_mbridge.training.models.data_parallel import register_buffers
from cloudai_mbridge.training.models.param_norm import calc_params_l2_norm
from cloudai_mbridge.training.process import hang
from cloudai_mbridge.training.process.device import logical_and_across_model_parallel_group
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.profiling import (
    finish_profiling,
    handle_profiling_step,
    initialize_pytorch_profiler,
    step_tensor_inspection,
    stop_tensor_inspection,
)
from cloudai_mbridge.training.reporting.progress_log import (
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
)
from cloudai_mbridge.training.reporting.reports import flops_of_batch
from cloudai_mbridge.training.reporting.training_log import training_log
from cloudai_mbridge.training.resilience import fault_tolerance
from cloudai_mbridge.training.resilience.straggler import configure_straggler, safe_shutdown_nvrx_straggler_manager
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.step import (
    StepResult,
    _dummy_train_step,
    _handle_mxfp8_param_buffer_copy,
    _should_skip_and_handle_iteration,
    prepare_forward_step_func,
    samples_per_step,
    train_step,
    with_own_reports,
)

__all__ = [
    "_dummy_train_step",
    "_finish_train",
    "_handle_mxfp8_param_buffer_copy",
    "_should_skip_and_handle_iteration",
    "checkpoint_and_decide_exit",
    "compute_throughputs_and_append_to_progress_log",
    "disable_forward_pre_hook",
    "enable_forward_pre_hook",
    "get_start_time_from_progress_log",
    "post_training_step_callbacks",
    "save_checkpoint_and_time",
    "should_disable_forward_pre_hook",
    "train",
    "train_step",
]


def train(
    forward_step_func: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    global_state: GlobalState,
    checkpointing_context: dict[str, Any],
    process_non_loss_data_func: Any = None,
    non_loss_data_func: Any = None,
    callback_manager: CallbackManager | None = None,
) -> None:
    """Train until `train_iters` steps are done. Every rank calls it.

    callback_manager: replaces that of `global_state`.
    SystemExit: the run leaves early: 0 after a signal, a time limit or an interval; 16 to be resumed so that a
        suspicious result can be examined; 17 when that result has proved wrong. A checkpoint is saved before.
    """
    state, cfg, progress = global_state, global_state.cfg, global_state.train_state
    state.callback_manager = callback_manager or state.callback_manager
    run = _LoopState(forward_step_func, model, optimizer, scheduler, state)
    args = (model, optimizer, scheduler)
    should_exit, exit_code = False, 0

    def save() -> None:
        flops = progress.floating_point_operations_so_far
        save_checkpoint_and_time(state, *args, flops, checkpointing_context, train_data_iterator=train_data_iterator)

    try:
        run.fire("on_train_start")
        run.hooks = FirstStepHooks(cfg, model, is_resumed=run.loaded_iteration > 0)
        if cfg.train.check_weight_hash_across_dp_replicas_interval is not None:
            check_weights(model, progress.step, toggle_hooks=False)
        state.timers("interval-time", log_level=0).start(barrier=True)
        while progress.step < required(cfg.train.train_iters):
            run.begin_step()
            _update_batch_size(state, save)
            if not _should_skip_and_handle_iteration(state, train_data_iterator):
                result = run.step(train_data_iterator)
                loss_dict, skipped, should_save, should_exit, exit_code, grad_norm, num_zeros = result
                if should_save and cfg.checkpoint.save:
                    save()
                if should_exit:
                    barrier_and_log(f"exiting program with code {exit_code} at iteration {progress.step}")
                    break
                run.count_step(bool(skipped))
                run.log(loss_dict, skipped, grad_norm, num_zeros)
            run.evaluate_if_due(valid_data_iterator, process_non_loss_data_func, non_loss_data_func)
            run.end_step()
            flops = progress.floating_point_operations_so_far
            should_exit = checkpoint_and_decide_exit(state, *args, flops, checkpointing_context, train_data_iterator)
            if should_exit:
                break
    finally:  # recordings are written if training ends inside the window
        finish_profiling(cfg.profiling, dist.get_rank(), run.profiler, run.nsys_context, iteration=progress.step)
    run.close()
    run.fire("on_train_end")
    if should_exit:
        _finish_train(state)
        raise EarlyExit(exit_code)


class _LoopState:
    """State of the loop from step to step in addition to the counters, and its actions around `train_step`."""

    hooks: FirstStepHooks  # made after the callbacks of the start

    def __init__(
        self, forward_step_func: Any, model: list[Any], optimizer: Any, scheduler: Any, state: GlobalState
    ) -> None:
        self.state, self.cfg = state, state.cfg
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        fire = partial(callbacks.fire, manager=state.callback_manager, state=state, model=model)
        self.fire: Callable[..., None] = partial(fire, optimizer=optimizer, scheduler=scheduler)
        self.forward_step_func = with_own_reports(prepare_forward_step_func(forward_step_func, state))
        self.train_step = _measured_by_nvrx(state)
        self.loaded_iteration = state.train_state.step
        self._total_loss_dict: dict[str, Any] = {}
        self._report_memory = True
        self.nsys_context: Any = None
        cfg, first_step = self.cfg, self.loaded_iteration
        window = cfg.logger.throughput_window_size + 1
        self._history = deque[float](maxlen=window) if cfg.logger.log_throughput_to_tensorboard else None
        for chunk in model:
            chunk.train()
        machine = get_rerun_state_machine()
        if machine.current_iteration != first_step:
            if dist.get_rank() == 0:
                write_line(f"Setting rerun_state_machine.current_iteration to {first_step}...")
            machine.current_iteration = first_step
        if (energy := state.energy_monitor) is not None:
            energy.setup()
            energy.resume()
        if cfg.train.manual_gc:
            assert cfg.train.manual_gc_interval >= 0, "train.manual_gc_interval is negative"
            gc.disable()
            gc.collect()
        configure_straggler(state)
        self.profiler = initialize_pytorch_profiler(cfg.profiling, cfg.logger.tensorboard_dir, first_step=first_step)
        if self.profiler is not None:
            self.profiler.start()
        self._flops_since_last_log: float = 0.0  # of the straggler detector's report
        state.flops_at_start = state.train_state.floating_point_operations_so_far
        self.graphs = TrainingGraphs(cfg, model, optimizer)

    def begin_step(self) -> None:
        """Profile, and see whether an asynchronous save has ended."""
        context = handle_profiling_step(self.cfg.profiling, self.state.train_state.step, dist.get_rank(), self.profiler)
        self.nsys_context = context or self.nsys_context
        queue = self.state.async_calls_queue
        is_saving = queue is not None and queue.get_num_unfinalized_calls() > 0  # the same on every rank
        with outside_step_time(self.state) if is_saving else nullcontext():
            _finalize_async_save(self.state)
        if self.state.train_state.step == self.loaded_iteration + 1:
            if self.cfg.ddp.use_megatron_fsdp:
                with outside_step_time(self.state):
                    register_buffers(self.cfg, self.model)
            if (seconds := self.cfg.dist.distributed_timeout_seconds_after_init) is not None:
                update_pg_timeout(timedelta(seconds=seconds))  # the first step takes longer than any other

    def step(self, data_iterator: Any) -> StepResult:
        """Run `train_step`, and notify its observers."""
        state = self.state
        self.graphs.capture_if_due(partial(outside_step_time, state))  # outside of the step time
        fault_tolerance.on_training_step_start(state)
        self.fire("on_train_step_start")
        objects = (self.model, self.optimizer, self.scheduler, state)
        result: StepResult = self.train_step(self.forward_step_func, data_iterator, *objects)
        fault_tolerance.on_training_step_end(state)
        self.fire("on_train_step_end", loss_dict=result[0], grad_norm=result[5], skipped_iter=bool(result[1]))
        step_tensor_inspection(self.cfg.tensor_inspect)
        return result

    def count_step(self, was_skipped: bool) -> None:
        """Count a step that was run: its samples and FLOPs."""
        self.hooks.step_done(was_skipped)
        self.graphs.step_done(was_skipped)
        progress, train = self.state.train_state, self.cfg.train
        progress.step += 1
        batch = samples_per_step(self.state)
        dropped = get_current_global_batch_size() - get_current_running_global_batch_size()
        assert dropped >= 0 if train.decrease_batch_size_if_needed else dropped == 0, f"{dropped} samples were dropped"
        progress.consumed_train_samples += batch
        progress.skipped_train_samples += dropped
        model: Any = self.cfg.model
        self.state.packed.end_step()
        length = self.state.step_seq_length or int(model.seq_length)
        flops = flops_of_batch(model, batch, length, self.state.packed.of_step)
        progress.floating_point_operations_so_far += flops
        self._flops_since_last_log += flops
        if self._history is not None:
            self._history.append(time.time() - self.state.start_time)

    def log(self, loss_dict: Any, skipped: int, grad_norm: float | None, num_zeros: int | None) -> None:
        """Report the step."""
        learning_rate, decoupled = learning_rates(self.optimizer, self.cfg)
        params_norm = None
        if self.cfg.logger.log_params_norm:
            with without_forward_pre_hooks(self.model):  # else updates of other ranks are not gathered yet
                params_norm = calc_params_l2_norm(
                    self.model,
                    self.cfg.model,
                    self.cfg.ddp.use_megatron_fsdp,
                    force_create_fp32_copy=self.cfg.optimizer.use_precision_aware_optimizer,
                )
        self._report_memory = training_log(
            loss_dict,
            self._total_loss_dict,
            learning_rate,
            decoupled,
            loss_scale_of(self.optimizer),
            self._report_memory,
            skipped,
            grad_norm,
            params_norm,
            num_zeros,
            self.cfg,
            self.state,
            self._history,
            self.model,
            log_max_attention_logit=self.state.max_attention_logit,
            loaded_iteration=self.loaded_iteration,
            seq_length=self.state.step_seq_length,
        )

    def evaluate_if_due(self, data_iterator: Any, process_non_loss_data_func: Any, non_loss_data_func: Any) -> None:
        """Evaluate on the validation set, outside of the step time."""
        progress, interval = self.state.train_state, self.cfg.validation.eval_interval
        first = self.cfg.validation.start_eval_at_iter or 0
        if not (progress.do_valid and interval and progress.step >= first and progress.step % interval == 0):
            return
        manual_gc = self.cfg.train.manual_gc and self.cfg.train.manual_gc_eval
        timer = self.state.timers("eval-time", log_level=0)
        with outside_step_time(self.state), without_forward_pre_hooks(self.model):
            if manual_gc:
                gc.collect()  # garbage of training must not pile up during the evaluation
            timer.start(barrier=True)
            evaluate_and_print_results(
                self.state,
                f"iteration {self.state.train_state.step}",
                self.forward_step_func,
                data_iterator,
                self.model,
                self.model[0].config,
                verbose=False,
                process_non_loss_data_func=process_non_loss_data_func,
                non_loss_data_func=non_loss_data_func,
            )
            timer.stop()
            if manual_gc:
                gc.collect(generation=0)

    def end_step(self) -> None:
        """Run the actions due after a step; report the step to the hang watch."""
        self._flops_since_last_log = post_training_step_callbacks(
            self.model,
            self._flops_since_last_log,
            self.state.straggler_timer,
            self.state.train_state.step,
            self.profiler,
            self.cfg,
            has_forward_pre_hooks(self.cfg),
            self.nsys_context,
        )
        hang.step_done()

    def close(self) -> None:
        """Leave everything as it should be found after training. A collective."""
        if self.state.tensorboard_logger is not None:
            self.state.tensorboard_logger.flush()
        self.graphs.close()
        self.hooks.close()
        if self.cfg.train.manual_gc:
            gc.enable()
        self.state.timers("interval-time").stop()
        _finalize_async_save(self.state, blocking=True)
        safe_shutdown_nvrx_straggler_manager(self.state.nvrx_straggler_manager)
        if (energy := self.state.energy_monitor) is not None:
            total = energy.get_total()  # a collective
            if dist.get_rank() == 0:
                write_line(f"Total training energy (GPU): {total / 1e6} MJ")
            energy.shutdown()


def _measured_by_nvrx(state: GlobalState) -> Any:
    """Return `train_step`, wrapped by the straggler manager if there is one. A collective then.

    A failing manager is dropped, on every rank: its reports are collectives.
    """
    if (manager := state.nvrx_straggler_manager) is None:
        return train_step
    problem: Exception | None = None
    measured: Any = train_step
    try:
        manager.initialize()
        measured = manager.wrap_train_step_function(train_step)
    except Exception as error:
        problem = error
    if logical_and_across_model_parallel_group(problem is None, dist.group.WORLD):
        return measured
    safe_shutdown_nvrx_straggler_manager(manager)
    state.nvrx_straggler_manager = None
    if problem is not None or dist.get_rank() == 0:
        write_line(f"warning: no straggler detection: {problem or 'it failed on another rank'}")
    return train_step


def _update_batch_size(state: GlobalState, save: Any) -> None:
    """Follow the batch ramp-up, and save before the batch grows."""
    before, consumed = get_num_microbatches(), state.train_state.consumed_train_samples
    update_num_microbatches(consumed, consistency_check=False)
    if get_num_microbatches() != before and state.train_state.step != 0:
        assert get_num_microbatches() > before, f"micro-batches per step fell from {before} to {get_num_microbatches()}"
        if state.cfg.checkpoint.save and state.last_saved_step != state.train_state.step:
            save()
    update_num_microbatches(consumed, consistency_check=True, verbose=True)


def _finalize_async_save(state: GlobalState, blocking: bool = False, terminate: bool = False) -> None:
    fault_tolerance.on_checkpointing_start(state)
    if state.checkpoint_manager is None:
        maybe_finalize_async_save(state, state.cfg.checkpoint, blocking=blocking, terminate=terminate)
    else:
        state.checkpoint_manager.finalize_async_saves(state, blocking=blocking, terminate=terminate)
    fault_tolerance.on_checkpointing_end(is_async_finalization=True, global_state=state)


def _finish_train(global_state: GlobalState) -> None:
    """Close objects outliving the loop: asynchronous saves, adapters, loggers. May be called again. A collective."""
    safe_shutdown_nvrx_straggler_manager(global_state.nvrx_straggler_manager)
    _finalize_async_save(global_state, blocking=True, terminate=True)
    graphs.delete_all()
    stop_tensor_inspection(global_state.cfg.tensor_inspect)
    fault_tolerance.shutdown(global_state)
    global_state.close()
