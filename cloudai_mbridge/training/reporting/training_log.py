"""Report a finished step, as Megatron-Bridge's `training_log`: console lines, the record, loggers' series."""

import math
import os
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches

from cloudai_mbridge.training.config.container import required
from cloudai_mbridge.training.process.device import current_device, largest, reduce_max_stat_across_model_parallel_group
from cloudai_mbridge.training.process.log_lines import (
    StepReport,
    render_iteration,
    render_step_record,
    render_step_time,
    run_token,
    write_line,
)
from cloudai_mbridge.training.process.timers import timers_to_log
from cloudai_mbridge.training.profiling.memory_history import dump_memory_snapshot
from cloudai_mbridge.training.reporting.moe_metrics import _build_moe_metric_writer, track_auxiliary_losses
from cloudai_mbridge.training.reporting.reports import peak_memory_gib, report_memory
from cloudai_mbridge.training.reporting.step_flops import flops_per_step
from cloudai_mbridge.training.reporting.step_scalars import (
    Scalars,
    Sinks,
    StepValues,
    is_any_logger_configured,
    memory_scalars,
    report_scalars,
    step_scalars,
)
from cloudai_mbridge.training.reporting.theoretical_memory import report_theoretical_memory

_ADVANCED, _SKIPPED, _NAN = "advanced iterations", "skipped iterations", "nan iterations"
_COUNTERS = (_ADVANCED, _SKIPPED, _NAN)


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
    _accumulate(total_loss_dict, loss_dict, bool(skipped_iter))
    dump_memory_snapshot(config.profiling, global_state.train_state.step, dist.get_rank())
    due = _Due.at(config.logger, global_state.train_state.step)
    if due.at_all:
        learning_rate = reduce_max_stat_across_model_parallel_group(learning_rate, _group(pg_collection, "mp"))
    micro_batch_size = required(config.train.micro_batch_size)
    values = StepValues(
        losses=loss_dict,
        learning_rate=learning_rate,
        decoupled_learning_rate=decoupled_learning_rate,
        loss_scale=loss_scale,
        grad_norm=grad_norm,
        params_norm=params_norm,
        num_zeros=num_zeros_in_grad,
        max_attention_logit=log_max_attention_logit,
        batch_size=_group(pg_collection, "dp").size() * micro_batch_size * get_num_microbatches(),
        seq_length=int(config.model.seq_length) if seq_length is None else seq_length,
        history=history_wct,
        model=model,
    )
    log = _Log(config, global_state, total_loss_dict, pg_collection, due)
    log.auxiliary_losses(is_skipped=bool(skipped_iter))
    if due.scalars:
        log.at_logger_interval(values)
    if due.memory and not (due.console and report_memory_flag):
        _print_memory_in_use(config.logger, global_state.train_state.step, pg_collection)
    if due.console:
        log.at_log_interval(values)
        report_memory_flag = log.memory(report_memory_flag, loaded_iteration)
        for name, total in total_loss_dict.items():
            total_loss_dict[name] = 0 if name in _COUNTERS else torch.zeros(1, device=total.device)
    log.send()
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


@dataclass(frozen=True)
class _Due:
    """Reports due after a step; the same on every rank, although only the last one has loggers."""

    console: bool
    loggers: bool  # any logger exists
    scalars: bool  # and it is their turn
    memory: bool  # in use, at its own interval

    @classmethod
    def at(cls, logger: Any, step: int) -> "_Due":
        has_loggers = is_any_logger_configured(logger) and not logger.skip_train_metrics_log
        return cls(
            console=step % logger.log_interval == 0,
            loggers=has_loggers,
            scalars=has_loggers and step % logger.tensorboard_log_interval == 0,
            memory=bool(logger.log_memory_interval) and step % logger.log_memory_interval == 0,
        )

    @property
    def at_all(self) -> bool:
        return self.console or self.scalars


class _Log:
    """The report of one step. Every method but `send` is a collective."""

    def __init__(self, config: Any, state: Any, totals: dict[str, Any], pg_collection: Any, due: _Due) -> None:
        self._config, self._state, self._totals, self._groups = config, state, totals, pg_collection
        self._logger, self._step = config.logger, state.train_state.step
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._sinks = Sinks(state) if due.loggers and due.at_all else None
        self._due, self._scalars = due, Scalars()

    def auxiliary_losses(self, is_skipped: bool) -> None:
        """Take the routers' and multi-token prediction's losses from Megatron-Core."""
        sinks = self._sinks if self._due.scalars else None
        track_auxiliary_losses(
            self._config.model,
            get_num_microbatches(),
            self._step,
            _build_moe_metric_writer(sinks.tensorboard, sinks.comet, sinks.mlflow) if sinks else None,
            sinks.wandb if sinks else None,
            None if is_skipped else self._totals,
            self._groups,
        )

    def at_logger_interval(self, values: StepValues) -> None:
        memory = memory_scalars(self._logger, _group(self._groups, "pp"))
        if self._sinks:
            self._scalars = step_scalars(values, self._config, self._state, memory)
        names = timers_to_log(self._logger.timing_log_level)
        if self._logger.log_timers_to_tensorboard and names:
            # not reset: they run on until the console's report, as the count of steps does
            iterations = self._totals[_ADVANCED] + self._totals[_SKIPPED]
            times = self._state.timers._get_global_min_max_time(names, False, False, iterations)
            self._scalars.common |= {f"{name}-time": slowest for name, (_, slowest) in times.items()}

    def at_log_interval(self, values: StepValues) -> None:
        report = self._report(values)
        self._scalars.common |= report_scalars(report, self._world_size)
        is_last = self._rank == self._world_size - 1
        if not self._logger.skip_train_metrics_log:
            if self._rank == 0 and report.tflops_per_gpu is not None:
                write_line(render_step_time(report))
            if is_last:
                write_line(render_iteration(report, datetime.now(), self._logger.log_throughput))
        if is_last:
            write_line(render_step_record(report, run_token(os.environ)))
        names = timers_to_log(self._logger.timing_log_level)
        if names:
            times = self._state.timers.get_all_timers_string(names, normalizer=self._logger.log_interval)
            if is_last and times is not None:
                write_line(times)

    def _report(self, s: StepValues) -> StepReport:
        progress, totals, monitor = self._state.train_state, self._totals, self._state.energy_monitor
        iterations = totals[_ADVANCED] + totals[_SKIPPED]
        elapsed = self._state.timers("interval-time").elapsed(barrier=True)
        slowest, peak_memory = largest(elapsed, peak_memory_gib(current_device()))
        step_time_s = slowest / iterations
        energy = None if monitor is None else monitor.lap() / iterations / self._world_size
        losses = self._losses(s.losses) if self._rank == self._world_size - 1 else {}
        return StepReport(
            step=progress.step,
            train_iters=required(self._config.train.train_iters),
            step_time_s=step_time_s,
            tflops_per_gpu=self._tflops(s.seq_length, step_time_s),
            consumed_samples=progress.consumed_train_samples,
            skipped_samples=progress.skipped_train_samples,
            global_batch_size=s.batch_size,
            learning_rate=s.learning_rate,
            loss_scale=s.loss_scale,
            losses=losses,
            grad_norm=s.grad_norm,
            num_zeros=s.num_zeros,
            params_norm=s.params_norm,
            max_attention_logit=s.max_attention_logit,
            peak_memory_gib=peak_memory,
            energy_per_gpu_j=energy,
            power_per_gpu_w=None if energy is None or not step_time_s else energy / step_time_s,
            skipped_iterations=totals[_SKIPPED],
            nan_iterations=max(totals[_NAN], int(any(not math.isfinite(x) for x in losses.values()))),
        )

    def _losses(self, last: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the means since the last report; the last step's own if the optimizer has skipped all of them."""
        if not (advanced := self._totals[_ADVANCED]):
            return {name: float(loss) for name, loss in last.items()}
        return {name: float(total) / advanced for name, total in self._totals.items() if name not in _COUNTERS}

    def _tflops(self, seq_length: int, step_time_s: float) -> float | None:
        model = self._config.model
        if getattr(model, "kv_channels", None) is None or getattr(model, "num_attention_heads", None) is None:
            return None
        if self._rank not in (0, self._world_size - 1) or not step_time_s:
            return None
        return flops_per_step(self._state, seq_length) / step_time_s / self._world_size / 1e12

    def memory(self, is_due: bool, loaded_iteration: int) -> bool:
        """Print the memory that the model should need and that is in use, if due; return whether it stays due."""
        if not is_due:
            return False
        if self._rank == 0:
            report_theoretical_memory(self._config, get_num_microbatches(), verbose=True)
        _print_memory_in_use(self._logger, self._step, self._groups)
        return bool(self._step <= loaded_iteration + 1)

    def send(self) -> None:
        if self._sinks:
            self._sinks.log(self._scalars, self._step, self._state.train_state.consumed_train_samples)


def _print_memory_in_use(logger: Any, step: int, pg_collection: Any) -> None:
    report = report_memory(logger.memory_keys)
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
