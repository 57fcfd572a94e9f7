"""Send the numbers of a step to every logger that is open."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cloudai_mbridge.training.utils.log_lines import write_line

_MLFLOW_NAMES = {"throughput/tflops/device": "throughput/tflops_per_device"}  # "throughput/tflops" is a name already


def is_any_logger_configured(logger_config: Any) -> bool:
    """Return whether the last rank logs to anything but the console; the same on every rank."""
    c = logger_config
    return bool(c.tensorboard_dir or c.wandb_project or c.mlflow_experiment or c.comet_project)


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
            self._to_tensorboard(numbers, scalars.against_samples, step, samples)
        if self.wandb is not None:
            attempt("W&B", lambda: self.wandb.log({**numbers, **more}, step))
        if self.mlflow is not None:
            renamed = {_MLFLOW_NAMES.get(name, name): value for name, value in {**numbers, **more}.items()}
            attempt("MLflow", lambda: self.mlflow.log_metrics(renamed, step=step))
        if self.comet is not None:
            attempt("Comet", lambda: self.comet.log_metrics(numbers, step=step))

    def _to_tensorboard(
        self, numbers: Mapping[str, float], against_samples: Mapping[str, Any], step: int, n: int
    ) -> None:
        for name, value in numbers.items():
            self.tensorboard.add_scalar(name, value, step)
            if name in against_samples:
                self.tensorboard.add_scalar(f"{name} vs samples", value, n)


_failed: set[str] = set()


def attempt(service: str, log: Callable[[], Any]) -> None:
    """Call `log`; if the service fails, say so the first time, and go on."""
    try:
        log()
    except Exception as error:
        if service not in _failed:
            _failed.add(service)
            write_line(f"warning: {service} did not take the numbers of a step; training goes on: {error!r}")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
