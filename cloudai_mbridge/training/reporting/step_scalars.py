"""The numbers of a step for the loggers, under Megatron-Bridge's names, and their way to every logger that is open."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.config.container import required
from cloudai_mbridge.training.process.device import reduce_max_memory_across_pp_group
from cloudai_mbridge.training.process.log_lines import StepReport, write_line
from cloudai_mbridge.training.reporting.loggers import SERVICES
from cloudai_mbridge.training.reporting.reports import (
    report_l2_norm_grad,
    report_memory,
    report_runtime,
    report_throughput,
)

_MLFLOW_NAMES = {"throughput/tflops/device": "throughput/tflops_per_device"}  # "throughput/tflops" is a name already


def is_any_logger_configured(logger_config: Any) -> bool:
    """Return whether the last rank logs to anything but the console; the same on every rank."""
    return any(getattr(logger_config, setting) for setting, _, _ in SERVICES)


@dataclass
class Scalars:
    """The numbers of one step, by series name."""

    common: dict[str, Any] = field(default_factory=dict)
    against_samples: dict[str, Any] = field(default_factory=dict)  # TensorBoard shows them over samples too
    wandb_and_mlflow: dict[str, Any] = field(default_factory=dict)


class Sinks:
    """The loggers of this rank; any of them may be None. A service that fails is reported once and ends no run."""

    def __init__(self, state: Any) -> None:
        self.tensorboard = state.tensorboard_logger
        self.wandb = state.wandb_logger
        self.mlflow = state.mlflow_logger
        self.comet = state.comet_logger

    def __bool__(self) -> bool:
        return any(sink is not None for sink in (self.tensorboard, self.wandb, self.mlflow, self.comet))

    def log(self, scalars: Scalars, step: int, samples: int) -> None:
        """Log the numbers. samples: sequences consumed so far."""
        numbers = _numbers({**scalars.common, **scalars.against_samples})
        more = _numbers(scalars.wandb_and_mlflow)
        if self.tensorboard is not None:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, step)
                if name in scalars.against_samples:
                    self.tensorboard.add_scalar(f"{name} vs samples", value, samples)
        if self.wandb is not None:
            attempt("W&B", lambda: self.wandb.log({**numbers, **more}, step))
        if self.mlflow is not None:
            renamed = {_MLFLOW_NAMES.get(name, name): value for name, value in {**numbers, **more}.items()}
            attempt("MLflow", lambda: self.mlflow.log_metrics(renamed, step=step))
        if self.comet is not None:
            attempt("Comet", lambda: self.comet.log_metrics(numbers, step=step))


_failed: set[str] = set()


def attempt(service: str, log: Callable[[], Any]) -> None:
    """Call `log`; if the service fails, warn the first time, and continue."""
    try:
        log()
    except Exception as error:
        if service not in _failed:
            _failed.add(service)
            write_line(f"warning: {service} did not take the numbers of a step; training continues: {error!r}")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


@dataclass
class StepValues:
    """Measurements of a step; batch_size is in sequences over all ranks, history in seconds."""

    losses: dict[str, torch.Tensor]  # on the last pipeline stage only
    learning_rate: float | None
    decoupled_learning_rate: float | None
    loss_scale: float
    grad_norm: float | None
    params_norm: float | None
    num_zeros: int | None
    max_attention_logit: float | None
    batch_size: int
    seq_length: int
    history: Sequence[float] | None
    model: list[Any]


def step_scalars(s: StepValues, config: Any, state: Any, memory: Mapping[str, int | float]) -> Scalars:
    """Return the values of a step to log at the loggers' interval. memory: of `memory_scalars`."""
    logger, progress = config.logger, state.train_state
    common = {
        "decoupled-learning-rate": s.decoupled_learning_rate,
        "skipped-train-samples": progress.skipped_train_samples or None,
        **memory,
    }
    against_samples = {
        "learning-rate": s.learning_rate,
        "batch-size": s.batch_size,
        **s.losses,
        "loss-scale": s.loss_scale if logger.log_loss_scale_to_tensorboard else None,
        "world-size": dist.get_world_size() if logger.log_world_size_to_tensorboard else None,
        "grad-norm": s.grad_norm,
        "num-zeros": s.num_zeros,
        "params-norm": s.params_norm,
        "max-attention-logit": s.max_attention_logit,
    }
    return Scalars(
        common={**_known(common), **_reports(s, config, state)},
        against_samples=_known(against_samples),
        wandb_and_mlflow={"samples vs steps": progress.consumed_train_samples},
    )


def memory_scalars(logger: Any, pp_group: Any) -> dict[str, int | float]:
    """Return the memory in use, the greatest of the pipeline stages; every rank must call it."""
    if not logger.log_memory_to_tensorboard:
        return {}
    report = reduce_max_memory_across_pp_group(report_memory(logger.memory_keys), pp_group)
    return {f"memory/{name}": value for name, value in report.items()}


def report_scalars(r: StepReport, world_size: int) -> dict[str, float]:
    """Return the additional values of a log step: rates, time and energy per step."""
    tflops = r.tflops_per_gpu
    values = {
        "throughput/tflops/device": tflops,
        "throughput/tflops": None if tflops is None else tflops * world_size,
        "iteration-time": r.step_time_s,
        "iter-energy/gpu": r.energy_per_gpu_j,
        "power/gpu": r.power_per_gpu_w,
    }
    return _known(values)


def _reports(s: StepValues, config: Any, state: Any) -> dict[str, float]:
    logger, train, progress = config.logger, config.train, state.train_state
    values: dict[str, float] = {}
    if logger.log_throughput_to_tensorboard and s.history is not None:
        window = logger.throughput_window_size
        values |= report_throughput(train, progress.step, s.seq_length, s.history, window)
    if logger.log_runtime_to_tensorboard:
        iters, unit = required(train.train_iters), logger.runtime_time_unit
        values |= report_runtime(progress, state.start_time, s.seq_length, iters, unit)
    if logger.log_l2_norm_grad_to_tensorboard:
        values |= report_l2_norm_grad(s.model)
    return values


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
