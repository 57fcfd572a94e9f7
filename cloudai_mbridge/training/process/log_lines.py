"""The lines that a run prints for its readers: two per step in Megatron-Bridge's format, and one record, `MBRIDGE_STEP
{json}`, at full precision; a run opens with `MBRIDGE_RUN {json}`. In a job of mbridge records carry the job's token.
Non-finite numbers are "nan", "inf" and "-inf", for which JSON has no literals. Standard library only."""

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

RUN_MARK = "MBRIDGE_RUN"
STEP_MARK = "MBRIDGE_STEP"
# Every process of a job of this machine has it in its environment, and is found by it.
LOCAL_JOB_VARIABLE = "MBRIDGE_LOCAL_JOB"
# The token of a Slurm job: sites may rewrite names, and keep environments from jobs. Either identifies the job.
JOB_TOKEN_VARIABLE = "MBRIDGE_JOB_TOKEN"  # noqa: S105 (a name)
RECORD_VERSION = 1

# Kinds of memory that `peak_memory_gib` of a step may measure
RESERVED_MEMORY = "accelerator, reserved"
RESIDENT_MEMORY = "resident set"

# Of a name the last one: a site may write more behind it
_TOKEN = re.compile(r"(?:^|.*\.)([0-9a-f]{16})", re.DOTALL)


@dataclass(frozen=True)
class StepReport:
    """One finished training step, or the mean of the steps since the last report.

    step_time_s is the slowest rank's; tflops_per_gpu is model FLOPs of the step / step_time_s / world size / 1e12,
    None if the model's FLOPs are unknown; losses are means over the tokens of the global batch. Energy is in J per step
    and GPU, power in W per GPU. peak_memory_gib is the largest of any rank so far, of the run's `memory_kind`.
    """

    step: int
    train_iters: int
    step_time_s: float
    tflops_per_gpu: float | None
    consumed_samples: int
    global_batch_size: int
    learning_rate: float | None
    loss_scale: float
    losses: Mapping[str, float]
    grad_norm: float | None
    num_zeros: int | None
    skipped_iterations: int
    nan_iterations: int
    skipped_samples: int = 0
    energy_per_gpu_j: float | None = None
    power_per_gpu_w: float | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    peak_memory_gib: float | None = None


def render_step_time(r: StepReport) -> str:
    return f"Step Time : {r.step_time_s:.2f}s GPU utilization: {r.tflops_per_gpu:.1f}MODEL_TFLOP/s/GPU"


def render_iteration(r: StepReport, now: datetime, with_throughput: bool = True) -> str:
    """Render Megatron's iteration line. A negative or NaN loss is left out of it, as there."""
    optional = [
        (" skipped samples: {:12d} |", r.skipped_samples or None),
        (" elapsed time per iteration (ms): {:.1f} |", r.step_time_s * 1000),
        (" throughput per GPU (TFLOP/s/GPU): {:.1f} |", r.tflops_per_gpu if with_throughput else None),
        (" energy per GPU (J/iter/GPU): {:.1f} |", r.energy_per_gpu_j),
        (" power per GPU (W/GPU): {:.1f} |", r.power_per_gpu_w),
        (" learning rate: {:.6E} |", r.learning_rate),
        (" global batch size: {:5d} |", r.global_batch_size),
        *((f" {name}: {{:.6E}} |", value) for name, value in r.losses.items() if value >= 0),
        (" loss scale: {:.1f} |", r.loss_scale),
        (" grad norm: {:.3f} |", r.grad_norm),
        (" num zeros: {} |", r.num_zeros),
        (" params norm: {:.3f} |", r.params_norm),
        (" max attention logit: {:.3f} |", r.max_attention_logit),
        (" number of skipped iterations: {:3d} |", r.skipped_iterations),
        (" number of nan iterations: {:3d} |", r.nan_iterations),
    ]
    start = f" [{now:%Y-%m-%d %H:%M:%S}] iteration {r.step:8d}/{r.train_iters:8d} |"
    start += f" consumed samples: {r.consumed_samples:12d} |"
    return start + "".join(form.format(value) for form, value in optional if value is not None)


def run_token(environ: Mapping[str, str]) -> str | None:
    """Return the token of the job that this process belongs to, None if mbridge did not start it.

    A local job has it in a variable of mbridge's, a Slurm job in its name, or in another variable. A job that another
    one submitted may have both; then both are given, with a space between them.
    """
    of_local, of_name, of_job = (
        _TOKEN.search(environ.get(name, "")) for name in (LOCAL_JOB_VARIABLE, "SLURM_JOB_NAME", JOB_TOKEN_VARIABLE)
    )
    if of_name and of_job and f".{of_job[1]}" in environ["SLURM_JOB_NAME"]:  # a site may have written another behind it
        of_name = of_job
    found = (of_local, of_name or of_job)
    return " ".join(match[1] for match in found if match) or None


def render_record(mark: str, values: Mapping[str, Any], token: str | None = None) -> str:
    head = {"version": RECORD_VERSION} | ({} if token is None else {"token": token})
    return f"{mark} {json.dumps(_finite({**head, **values}), allow_nan=False)}"


def render_step_record(r: StepReport, token: str | None = None) -> str:
    return render_record(STEP_MARK, vars(r), token)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_line(line: str) -> None:
    """Print one line with one write: ranks share the output, and a split line could be cut by another rank's."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
