"""The series that the loggers get. Their names are Megatron-Bridge's."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from cloudai_mbridge.training.utils.log_lines import StepReport
from cloudai_mbridge.training.utils.reduce import reduce_max_memory_across_pp_group
from cloudai_mbridge.training.utils.reports import (
    report_l2_norm_grad,
    report_memory,
    report_runtime,
    report_throughput,
)
from cloudai_mbridge.training.utils.required import required
from cloudai_mbridge.training.utils.scalars import Scalars
from cloudai_mbridge.training.utils.step_values import StepValues


def step_scalars(s: StepValues, config: Any, state: Any, memory: Mapping[str, int | float]) -> Scalars:
    """Return what is logged of a step at the loggers' interval. memory: of `memory_scalars`."""
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
    """Return what is logged at a log step beside it: rates, time and energy per step."""
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
