"""What no run can have measured: steps that were not asked for, and numbers that no clock and no device gives.

    step_time_s     1 us to 30 days. Starting one kernel takes some microseconds (NVIDIA, CUDA C++ Best Practices Guide
                    and Nsight Systems: launch latency), and a step starts many.
    tflops_per_gpu  up to twice the device's dense peak in its fastest format (of a device that is not known, of the
                    fastest one) in `estimate/data/hardware.toml`, which names its sources. Twice, because a formula
                    that counts masked attention counts FLOPs that are not done.
    peak_memory_gib up to 1 PiB.
    grad_norm       0 or more: it is a norm.

A number that is missing, not finite, or 0 as rounded lines say of what is small, is not judged here: it is not a
measurement, which fails a run where one is needed.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from cloudai_mbridge.estimate.hardware import find_gpu, gpus

_SHORTEST_STEP_S, _LONGEST_STEP_S = 1e-6, 30 * 86400.0
_OVER_PEAK = 2.0
_MOST_MEMORY_GIB = 2.0**20


class MeasuredStep(Protocol):
    """A step of a log, or of a report."""

    @property
    def step(self) -> int: ...
    @property
    def step_time_s(self) -> float | None: ...
    @property
    def tflops_per_gpu(self) -> float | None: ...
    @property
    def peak_memory_gib(self) -> float | None: ...


def missing_steps(steps: Sequence[MeasuredStep], num_steps: int) -> list[str]:
    """Return the reason if a step of 1 to `num_steps` is not there. What it costs depends on the steps alone."""
    numbers = {step.step for step in steps}
    first_missing = next(number for number in itertools.count(1) if number not in numbers)
    if first_missing > num_steps:
        return []
    done = sum(1 <= number <= num_steps for number in numbers)
    return [f"{done} of {num_steps} steps are in the log; the first missing is {first_missing}"]


def implausible(steps: Sequence[MeasuredStep], num_steps: int | None, device: object = None) -> list[str]:
    """Return the reasons, one for each kind of number, why steps cannot be true.

    num_steps: None if it is not known. device: what the run was on, as it says itself; None if it does not.
    """
    numbers = [step.step for step in steps]
    reasons = []
    if beyond := [number for number in numbers if number < 1 or (num_steps is not None and number > num_steps)]:
        asked = "steps count from 1" if num_steps is None else f"steps 1 to {num_steps} were asked for"
        reasons.append(f"step {beyond[0]} is in the log; {asked}")
    for name, unit, (lowest, highest) in _bounds(device if isinstance(device, str) else None):
        values = ((step.step, getattr(step, name, None)) for step in steps)
        wrong = ((step, value) for step, value in values if value and math.isfinite(value))
        if bad := next(((step, value) for step, value in wrong if not lowest <= value <= highest), None):
            reasons.append(f"step {bad[0]}: {name} = {bad[1]:g}{unit} is not possible; {lowest:g} to {highest:g} is")
    return reasons


@lru_cache(maxsize=64)
def _bounds(device: str | None) -> tuple[tuple[str, str, tuple[float, float]], ...]:
    gpu = find_gpu(device) if device else None
    known = [gpu] if gpu is not None and gpu.is_known else gpus().values()
    highest_peak = max(peak for each in known for peak in each.peak_tflops.values())
    return (
        ("step_time_s", " s", (_SHORTEST_STEP_S, _LONGEST_STEP_S)),
        ("tflops_per_gpu", "", (0.0, _OVER_PEAK * highest_peak)),
        ("peak_memory_gib", " GiB", (0.0, _MOST_MEMORY_GIB)),
        ("grad_norm", "", (0.0, math.inf)),
    )
