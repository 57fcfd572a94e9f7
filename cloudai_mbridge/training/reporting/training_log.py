"""Report a finished step, as Megatron-Bridge's `training_log`: console lines, the record, loggers' series."""

import math
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from cloudai_mbridge.training.compat.models import report_router_losses
from cloudai_mbridge.training.config.container import required
from cloudai_mbridge.training.process import device, log_lines
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import StepReport, write_line
from cloudai_mbridge.training.process.timers import timers_to_log
from cloudai_mbridge.training.profiling import dump_memory_snapshot
from cloudai_mbridge.training.reporting import loggers as services
from cloudai_mbridge.training.reporting import reports
from cloudai_mbridge.training.reporting.theoretical_memory import report_theoretical_memory

_ADVANCED, _SKIPPED, _NAN = "advanced iterations", "skipped iterations", "nan iterations"
_COUNTERS = (_ADVANCED, _SKIPPED, _NAN)
_NO_LOGGERS = (None, None, None, None)


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    decoupled_learning_rate: float | None,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | None,
    params_norm: float | None,
    num_zeros_in_grad: int | None,
    config: Any,
    global_state: Any,
    history_wct: Any,
    model: list[Any],
    pg_collection: Any = None,
    log_max_attention_logit: float | None = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
) -> bool:
    """Count the step, and report if a report is due. Every rank must call it after every step.

    The step time is the mean since the last report, the same on all ranks. Losses exist on the last stage's ranks only.
    The console's lines come from rank 0 (step time) and the last rank (all else, and the record).

    total_loss_dict: empty at first; kept here from step to step. learning_rate: None on a stage without parameters.
    seq_length: of this step, None for the model's. loaded_iteration: steps done when this process began.

    Returns whether to report the memory in use at the next report: only until the second step.
    """
    state, logger, progress, totals = global_state, config.logger, global_state.train_state, total_loss_dict
    _accumulate(totals, loss_dict, bool(skipped_iter))
    dump_memory_snapshot(config.profiling, progress.step, dist.get_rank())
    to_console, has_loggers, to_loggers, shows_memory = _due(logger, progress.step)
    if to_console or to_loggers:
        learning_rate = device.reduce_max_stat_across_model_parallel_group(learning_rate, _group(pg_collection, "mp"))
    loggers = state.open_loggers() if has_loggers and (to_console or to_loggers) else _NO_LOGGERS
    is_open = any(each is not None for each in loggers)
    writers, counted = loggers if to_loggers else _NO_LOGGERS, None if skipped_iter else totals
    track_auxiliary_losses(config.model, get_num_microbatches(), progress.step, writers, counted, pg_collection)
    length = int(config.model.seq_length) if seq_length is None else seq_length
    batch_size = _group(pg_collection, "dp").size() * required(config.train.micro_batch_size) * get_num_microbatches()
    numbers = {  # as fields of a StepReport
        "global_batch_size": batch_size,
        "learning_rate": learning_rate,
        "loss_scale": loss_scale,
        "grad_norm": grad_norm,
        "num_zeros": num_zeros_in_grad,
        "params_norm": params_norm,
        "max_attention_logit": log_max_attention_logit,
    }
    common: dict[str, Any] = _reduced_scalars(logger, state.timers, totals, pg_collection) if to_loggers else {}
    if to_loggers and is_open:
        common |= _reports(config, state, length, history_wct, model, decoupled_learning_rate)
    if shows_memory and not (to_console and report_memory_flag):
        _print_memory_in_use(logger, progress.step, pg_collection)
    if to_console:
        report = _report(config, state, totals, loss_dict, length, numbers)
        common |= _report_scalars(report)
        _print_report(report, logger, state.timers)
        if report_memory_flag:
            if dist.get_rank() == 0:
                report_theoretical_memory(config, get_num_microbatches(), verbose=True)
            _print_memory_in_use(logger, progress.step, pg_collection)
            report_memory_flag = bool(progress.step <= loaded_iteration + 1)
    if is_open:
        against_samples = _against_samples(logger, numbers, loss_dict) if to_loggers else {}
        services.log_scalars(loggers, common, against_samples, progress.step, progress.consumed_train_samples)
    return report_memory_flag


def _accumulate(totals: dict[str, Any], losses: dict[str, torch.Tensor], is_skipped: bool) -> None:
    """Add a step to the sums since the last report, on the device: reading a number from a GPU would stop it.

    A step that the optimizer skipped only counts, and as a NaN one if any of its losses is not finite.
    """
    for name in _COUNTERS:
        totals.setdefault(name, 0)
    totals[_SKIPPED if is_skipped else _ADVANCED] += 1
    if is_skipped:
        totals[_NAN] += any(not math.isfinite(float(loss.float().sum())) for loss in losses.values())
        return
    for name, loss in losses.items():
        value = loss.detach().float().reshape(1)
        totals[name] = totals[name] + value if name in totals else value.clone()


def _due(logger: Any, step: int) -> tuple[bool, bool, bool, bool]:
    """Return whether a report is due on the console; any logger exists, and is due; the memory in use is due.

    The same on every rank, although only the last one has loggers.
    """
    is_any_configured = any(getattr(logger, setting) for setting, _, _ in services.SERVICES)
    has_loggers = is_any_configured and not logger.skip_train_metrics_log
    return (
        step % logger.log_interval == 0,
        has_loggers,
        has_loggers and step % logger.tensorboard_log_interval == 0,
        bool(logger.log_memory_interval) and step % logger.log_memory_interval == 0,
    )


def track_auxiliary_losses(
    model: Any,
    num_microbatches: int,
    iteration: int,
    loggers: Sequence[Any],
    totals: dict[str, Any] | None,
    groups: Any = None,
) -> None:
    """Log the means of the losses that Megatron-Core keeps apart from the model's output, and reset them.

    They are the routers' and multi-token prediction's, and are added to `totals`. A collective for models that have
    such losses: every rank must call it in every step.
    """
    tensorboard, wandb, mlflow, comet = loggers
    writer = services._build_moe_metric_writer(tensorboard, comet, mlflow)
    if wandb is not None and writer is None:  # Megatron-Core logs to W&B only together with a writer
        writer = services._MoeMetricFanoutWriter(None, None, None)
    scale, mtp_layers = 1.0 / num_microbatches, getattr(model, "mtp_num_layers", None)
    if getattr(model, "num_moe_experts", None) is not None:
        kinds = model.moe_router_load_balancing_type
        names = {  # of the losses that any rank's routers may have; "seq_aux_loss" also is an "aux_loss"
            "load_balancing_loss": "aux_loss" in kinds,
            "seq_load_balancing_loss": "seq_aux_loss" in kinds,
            "global_load_balancing_loss": "global_aux_loss" in kinds,
            "z_loss": model.moe_z_loss_coeff is not None,
        }
        report_router_losses(
            [name for name, is_tracked in names.items() if is_tracked],
            model.num_layers + (mtp_layers or 0),
            loss_scale=scale,
            iteration=iteration,
            writer=writer,
            wandb_writer=wandb,
            total_loss_dict=totals,
            per_layer_logging=model.moe_per_layer_logging,
            num_layers=model.num_layers,
            moe_layer_freq=model.moe_layer_freq,
            mtp_num_layers=mtp_layers,
            pg_collection=groups,
        )
    if mtp_layers:
        MTPLossLoggingHelper.track_mtp_metrics(scale, iteration, writer, wandb, totals)


def _reduced_scalars(logger: Any, timers: Any, totals: dict[str, Any], groups: Any) -> dict[str, Any]:
    """Return the memory in use, the greatest of the pipeline stages, and the slowest rank's times. A collective."""
    scalars: dict[str, Any] = {}
    if logger.log_memory_to_tensorboard:
        report = device.reduce_max_memory_across_pp_group(
            reports.report_memory(logger.memory_keys), _group(groups, "pp")
        )
        scalars |= {f"memory/{name}": value for name, value in report.items()}
    names = timers_to_log(logger.timing_log_level)
    if logger.log_timers_to_tensorboard and names:
        # not reset: they run on until the console's report, as the count of steps does
        times = timers._get_global_min_max_time(names, False, False, totals[_ADVANCED] + totals[_SKIPPED])
        scalars |= {f"{name}-time": slowest for name, (_, slowest) in times.items()}
    return scalars


def _reports(
    config: Any, state: Any, seq_length: int, history: Any, model: list[Any], decoupled_learning_rate: float | None
) -> dict[str, float | None]:
    logger, train, progress = config.logger, config.train, state.train_state
    values: dict[str, float | None] = {}
    if logger.log_throughput_to_tensorboard and history is not None:
        values |= reports.report_throughput(train, progress.step, seq_length, history, logger.throughput_window_size)
    if logger.log_runtime_to_tensorboard:
        iters, unit = required(train.train_iters), logger.runtime_time_unit
        values |= reports.report_runtime(progress, state.start_time, seq_length, iters, unit)
    if logger.log_l2_norm_grad_to_tensorboard:
        values |= reports.report_l2_norm_grad(model)
    values["decoupled-learning-rate"] = decoupled_learning_rate
    values["skipped-train-samples"] = progress.skipped_train_samples or None
    return values


def _against_samples(logger: Any, numbers: dict[str, Any], losses: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "learning-rate": numbers["learning_rate"],
        "batch-size": numbers["global_batch_size"],
        **losses,
        "loss-scale": numbers["loss_scale"] if logger.log_loss_scale_to_tensorboard else None,
        "world-size": dist.get_world_size() if logger.log_world_size_to_tensorboard else None,
        **{name.replace("_", "-"): numbers[name] for name in ("grad_norm", "num_zeros", "params_norm")},
        "max-attention-logit": numbers["max_attention_logit"],
    }


def _report(
    config: Any,
    state: Any,
    totals: dict[str, Any],
    last: dict[str, torch.Tensor],
    seq_length: int,
    numbers: dict[str, Any],
) -> StepReport:
    """Return the report of the steps since the last one, and reset the sums. A collective. last: the step's losses."""
    rank, world_size, model, monitor = dist.get_rank(), dist.get_world_size(), config.model, state.energy_monitor
    iterations, progress = totals[_ADVANCED] + totals[_SKIPPED], state.train_state
    elapsed = state.timers("interval-time").elapsed(barrier=True)
    slowest, peak_memory = device.largest(elapsed, reports.peak_memory_gib(current_device()))
    step_time_s = slowest / iterations
    energy = None if monitor is None else monitor.lap() / iterations / world_size
    losses: dict[str, float] = {}
    if rank == world_size - 1:  # the last step's own if the optimizer has skipped all of them
        losses = {name: float(loss) for name, loss in last.items()}
        if advanced := totals[_ADVANCED]:
            losses = {name: float(total) / advanced for name, total in totals.items() if name not in _COUNTERS}
    tflops = None
    has_formula = None not in (getattr(model, "kv_channels", None), getattr(model, "num_attention_heads", None))
    if has_formula and rank in (0, world_size - 1) and step_time_s:
        tflops = reports.flops_per_step(state, seq_length) / step_time_s / world_size / 1e12
    report = StepReport(
        step=progress.step,
        train_iters=required(config.train.train_iters),
        consumed_samples=progress.consumed_train_samples,
        skipped_samples=progress.skipped_train_samples,
        step_time_s=step_time_s,
        tflops_per_gpu=tflops,
        losses=losses,
        peak_memory_gib=peak_memory,
        energy_per_gpu_j=energy,
        power_per_gpu_w=None if energy is None or not step_time_s else energy / step_time_s,
        skipped_iterations=totals[_SKIPPED],
        nan_iterations=max(totals[_NAN], int(any(not math.isfinite(x) for x in losses.values()))),
        **numbers,
    )
    for name, total in totals.items():
        totals[name] = 0 if name in _COUNTERS else torch.zeros(1, device=total.device)
    return report


def _report_scalars(r: StepReport) -> dict[str, float | None]:
    tflops = r.tflops_per_gpu
    return {
        "throughput/tflops/device": tflops,
        "throughput/tflops": None if tflops is None else tflops * dist.get_world_size(),
        "iteration-time": r.step_time_s,
        "iter-energy/gpu": r.energy_per_gpu_j,
        "power/gpu": r.power_per_gpu_w,
    }


def _print_report(report: StepReport, logger: Any, timers: Any) -> None:
    rank, is_last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    if not logger.skip_train_metrics_log:
        if rank == 0 and report.tflops_per_gpu is not None:
            write_line(log_lines.render_step_time(report))
        if is_last:
            write_line(log_lines.render_iteration(report, datetime.now(), logger.log_throughput))
    if is_last:
        write_line(log_lines.render_step_record(report, log_lines.run_token(os.environ)))
    if names := timers_to_log(logger.timing_log_level):
        times = timers.get_all_timers_string(names, normalizer=logger.log_interval)
        if is_last and times is not None:
            write_line(times)


def _print_memory_in_use(logger: Any, step: int, pg_collection: Any) -> None:
    report = reports.report_memory(logger.memory_keys)
    if report and _group(pg_collection, "dp").rank() == 0:
        values = " | ".join(f"{name}: {value}" for name, value in report.items())
        write_line(f"[Rank {dist.get_rank()}] (after {step} iterations) memory (GB) | {values}")


def _group(pg_collection: Any, name: str) -> Any:
    """Return a process group of the collection, of Megatron's state without one: mp, pp or dp."""
    if pg_collection is not None:
        return getattr(pg_collection, name)
    if name == "mp":
        return mpu.get_model_parallel_group()
    return mpu.get_pipeline_model_parallel_group() if name == "pp" else mpu.get_data_parallel_group()
