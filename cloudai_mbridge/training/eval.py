"""Evaluation: the mean losses over a number of global batches, without training on them."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.callbacks import CallbackManager
from cloudai_mbridge.training.loop.between_steps import is_over_on_any_rank
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.resilience import fault_tolerance
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.step import prepare_forward_step_func, run_schedule, with_own_reports

Evaluated = tuple[dict[str, torch.Tensor] | None, Any | None, bool]
_LARGEST_EXPONENT = 20.0  # of a perplexity that is still printed


def evaluate(
    state: GlobalState,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[Any],
    process_non_loss_data_func: Callable[..., Any] | None,
    config: Any,
    verbose: bool = False,
    non_loss_data_func: Callable[..., Any] | None = None,
    callback_manager: CallbackManager | None = None,
    is_test: bool = False,
) -> Evaluated:
    """Run `validation.eval_iters` global batches forward. Every rank calls it.

    process_non_loss_data_func: if given, one more global batch is run whose loss functions are called with
        `non_loss_data=True`; their results are collected.
    config: the model configuration of chunk 0; it has no timers meanwhile.
    non_loss_data_func: called with the model in place of that extra batch.
    callback_manager: replaces that of `state`. is_test: call its events of a test.

    Returns:
        (mean losses, `{}` off the last pipeline stage; non-loss data; False), or (None, None, True) if the time that
        `train.exit_duration_in_mins` allows is over.

    ValueError: a loss function reports anything but one value, or a pair [sum, number of tokens].
    """
    step = with_own_reports(prepare_forward_step_func(forward_step_func, state))
    kind, manager = "test" if is_test else "eval", callback_manager or state.callback_manager
    fire = partial(callbacks.fire, manager=manager, state=state, model=model)
    with _in_evaluation_mode(model):
        fire(f"on_{kind}_start")
        with _evaluating(state, config):
            sums: dict[str, tuple[torch.Tensor, bool]] = {}
            for i in range(state.cfg.validation.eval_iters or 0):
                if verbose and dist.get_rank() == 0:
                    write_line(f"Evaluating iter {i + 1}/{state.cfg.validation.eval_iters}")
                fault_tolerance.on_eval_step_start(state)
                fire(f"on_{kind}_step_start")
                losses = _forward(state, step, data_iterator, model)
                fire(f"on_{kind}_step_end")
                fault_tolerance.on_eval_step_end(state)
                _add(sums, losses)
                state.train_state.consumed_valid_samples += state.cfg.eval_batch_sizes[0]
                limit = state.cfg.train.exit_duration_in_mins
                if limit and is_over_on_any_rank((time.time() - state.start_time) / 60, limit):
                    if dist.get_rank() == 0:
                        write_line("Exiting during evaluation, timelimit reached")
                    return None, None, True
            collected = None
            if non_loss_data_func is not None:
                collected = non_loss_data_func(model)
            elif process_non_loss_data_func is not None:
                collected = _forward(state, step, data_iterator, model, collect_non_loss_data=True)
            means = _means(sums)
        state.timers.log(["evaluate"])
        fire(f"on_{kind}_end", total_loss_dict=means)
    return means, collected, False


def evaluate_and_print_results(
    state: GlobalState,
    prefix: str,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[Any],
    config: Any,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    callback_manager: CallbackManager | None = None,
    is_test: bool = False,
) -> bool:
    """Evaluate, print the result on the last rank and hand it to the loggers there. Every rank calls it.

    prefix: position of the run in the printed line.
    process_non_loss_data_func: called on the last rank, if TensorBoard is open, with the non-loss data, the step
        and the TensorBoard writer.
    callback_manager, is_test: as in `evaluate`.

    Returns:
        Whether the run's time is over. Nothing is printed then, nor if nothing was evaluated.
    """
    run = (state, forward_step_func, data_iterator, model, process_non_loss_data_func, config)
    means, collected, is_time_over = evaluate(*run, verbose, non_loss_data_func, callback_manager, is_test)
    if is_time_over or means is None:
        return True
    losses = {key: float(value) for key, value in means.items()}
    writer = state.tensorboard_logger if write_to_tensorboard else None
    if losses and dist.get_rank() == dist.get_world_size() - 1:
        for line in result_lines(prefix, losses):
            write_line(line)
        _log(state, writer, losses)
    if process_non_loss_data_func is not None and writer is not None:
        process_non_loss_data_func(collected, state.train_state.step, writer)
    return False


def result_lines(prefix: str, losses: dict[str, float]) -> list[str]:
    """Return the three lines with the result of an evaluation."""
    parts = [f"{key} value: {value:.6E} | {key} PPL: {perplexity(value):.6E} | " for key, value in losses.items()]
    line = f" validation loss at {prefix} | " + "".join(parts)
    return ["-" * (len(line) + 1), line, "-" * (len(line) + 1)]


def perplexity(loss: float) -> float:
    """Return exp(loss), bounded: an untrained model's would fill the line."""
    return math.exp(min(loss, _LARGEST_EXPONENT))  # in this order NaN stays NaN


def _add(sums: dict[str, tuple[torch.Tensor, bool]], losses: list[dict[str, torch.Tensor]]) -> None:
    """Add one batch's reports of the loss functions to the sums by name; it waits for nothing.

    sums: [sum, number of tokens or micro-batches], and whether the loss function has given the number.
    """
    for report in losses:
        for key, reported in report.items():
            value = reported.detach().reshape(-1).double()
            if (count := value.numel()) not in (1, 2):
                raise ValueError(
                    f"loss {key!r} has {count} values; a loss function reports one, or [sum, number of tokens]"
                )
            pair = value if count == 2 else torch.cat([value, torch.ones_like(value)])
            sums[key] = (sums[key][0] + pair if key in sums else pair, count == 2)


def _means(sums: dict[str, tuple[torch.Tensor, bool]]) -> dict[str, torch.Tensor]:
    """Return the mean over the tokens of all ranks, or over this rank's micro-batches without a count.

    A collective over data and context parallelism.
    """
    for pair, has_count in sums.values():
        if has_count:
            dist.all_reduce(pair, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return {key: (pair[0] / pair[1].clamp(min=1)).float() for key, (pair, _) in sums.items()}


@contextmanager
def _in_evaluation_mode(model: list[Any]) -> Iterator[None]:
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model:
            chunk.train()


@contextmanager
def _evaluating(state: GlobalState, config: Any) -> Iterator[None]:
    """Turn off gradients, timers and reruns. All are restored, also after an error."""
    machine = get_rerun_state_machine()
    mode, timers, timer = machine.get_mode(), config.timers, state.timers("evaluate", log_level=0)
    timer.start(barrier=True)
    machine.set_mode(RerunMode.DISABLED)
    config.timers = None
    try:
        with torch.no_grad():
            yield
    finally:
        config.timers = timers
        machine.set_mode(mode)
        timer.stop()


def _forward(
    state: GlobalState, step: Callable[..., Any], data_iterator: Any, model: list[Any], **options: Any
) -> list[Any]:
    """Run one global batch forward; `[]` off the last pipeline stage."""
    total, micro = state.cfg.eval_batch_sizes
    count = total // (micro * mpu.get_data_parallel_world_size())
    options |= {"forward_only": True, "micro_batch_size": micro}
    results = run_schedule(step, data_iterator, model, state, count, **options)
    if state.cfg.train.empty_unused_memory_level >= 1 and current_device().type != "cpu":
        torch.cuda.empty_cache()
    return results if mpu.is_pipeline_last_stage(ignore_virtual=True) else []


def _log(state: GlobalState, writer: Any, losses: dict[str, float]) -> None:
    step, samples = state.train_state.step, state.train_state.consumed_train_samples
    scalars = {f"{key} validation": value for key, value in losses.items()}
    if state.cfg.logger.log_validation_ppl_to_tensorboard:
        scalars |= {f"{key} validation ppl": perplexity(value) for key, value in losses.items()}
    if writer is not None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
            writer.add_scalar(f"{name} vs samples", value, samples)
    if state.wandb_logger is not None:
        state.wandb_logger.log(scalars, step)
    if state.mlflow_logger is not None:
        state.mlflow_logger.log_metrics({name.replace("/", "_"): value for name, value in scalars.items()}, step=step)
    if state.comet_logger is not None:
        state.comet_logger.log_metrics(scalars, step=step)
