"""The lines that a run prints for its readers. Standard library only, so that their formats can be tested anywhere.

Two lines per step have Megatron-Bridge's format and rounding. Beside them goes one machine-readable record per step,
`MBRIDGE_STEP {json}`, with every value at full precision; a run opens with one `MBRIDGE_RUN {json}` that says what
runs.
Non-finite numbers are the strings "nan", "inf" and "-inf": JSON has no literal for them.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

RUN_MARK = "MBRIDGE_RUN"
STEP_MARK = "MBRIDGE_STEP"
RECORD_VERSION = 1


@dataclass(frozen=True)
class StepReport:
    """One finished training step.

    step_time_s is the slowest rank's; tflops_per_gpu is model FLOPs of the step / step_time_s / world size / 1e12;
    losses are means over the tokens of the global batch.
    """

    step: int
    train_iters: int
    step_time_s: float
    tflops_per_gpu: float
    consumed_samples: int
    global_batch_size: int
    learning_rate: float | None
    loss_scale: float
    losses: Mapping[str, float]
    grad_norm: float | None
    num_zeros: int | None
    skipped_iterations: int
    nan_iterations: int


def render_step_time(r: StepReport) -> str:
    return f"Step Time : {r.step_time_s:.2f}s GPU utilization: {r.tflops_per_gpu:.1f}MODEL_TFLOP/s/GPU"


def render_iteration(r: StepReport, now: datetime) -> str:
    """Render Megatron's iteration line. A negative or NaN loss is left out of it, as there."""
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {r.step:8d}/{r.train_iters:8d} |",
        f" consumed samples: {r.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {r.step_time_s * 1000:.1f} |",
        f" throughput per GPU (TFLOP/s/GPU): {r.tflops_per_gpu:.1f} |",
    ]
    if r.learning_rate is not None:
        parts.append(f" learning rate: {r.learning_rate:.6E} |")
    parts.append(f" global batch size: {r.global_batch_size:5d} |")
    parts += [f" {name}: {value:.6E} |" for name, value in r.losses.items() if value >= 0]
    parts.append(f" loss scale: {r.loss_scale:.1f} |")
    if r.grad_norm is not None:
        parts.append(f" grad norm: {r.grad_norm:.3f} |")
    if r.num_zeros is not None:
        parts.append(f" num zeros: {r.num_zeros} |")
    parts.append(f" number of skipped iterations: {r.skipped_iterations:3d} |")
    parts.append(f" number of nan iterations: {r.nan_iterations:3d} |")
    return "".join(parts)


def render_record(mark: str, values: Mapping[str, Any]) -> str:
    return f"{mark} {json.dumps(_finite({'version': RECORD_VERSION, **values}), allow_nan=False)}"


def render_step_record(r: StepReport) -> str:
    return render_record(STEP_MARK, asdict(r))


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
