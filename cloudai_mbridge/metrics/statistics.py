"""Statistics with their window: the steps counted, and their number."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from pydantic import StrictInt

from cloudai_mbridge.estimate.hardware import find_gpu, gpus
from cloudai_mbridge.files.json_text import Number

_CAP = 1.1


@dataclass(frozen=True)
class Statistic:
    """Summary of `n` values; std is the population's, as CloudAI's report has it.

    capped_mean, capped_std: of the values with each step's time counted as at most a tenth above the median. By the
    capped mean points are ranked, searched and gated: a CUDA graph's capture or a hiccup does not decide.
    """

    n: StrictInt
    mean: Number
    median: Number
    min: Number
    max: Number
    std: Number
    capped_mean: Number
    capped_std: Number


def capped(times: Sequence[float]) -> list[float]:
    """Return positive values, each as at most a tenth above their median.

    Single slow steps cannot move the mean of capped values far, as with a median; if steps fall into several modes, it
    is as steady as a mean, unlike a median or a trimmed mean (docs/decisions.md has the figures).
    """
    highest = _CAP * statistics.median(times)
    return [min(time, highest) for time in times]


def capped_mean(times: Sequence[float]) -> float:
    return statistics.fmean(capped(times))


def capped_mean_of_rates(rates: Sequence[float]) -> float:
    """Return the rate of steps whose times are capped: the work over the capped mean time."""
    return 1 / capped_mean([1 / rate for rate in rates])


def summarize(values: Sequence[float | None], *, are_rates: bool = False) -> Statistic | None:
    """Summarize finite values; a missing value makes the whole statistic missing.

    are_rates: the values are work per time, not times: for the capped mean.
    """
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers or len(numbers) != len(values):
        return None
    try:
        within = [1 / rate for rate in capped([1 / rate for rate in numbers])] if are_rates else capped(numbers)
        return Statistic(
            n=len(numbers),
            mean=statistics.fmean(numbers),
            median=statistics.median(numbers),
            min=min(numbers),
            max=max(numbers),
            std=statistics.pstdev(numbers),
            capped_mean=capped_mean_of_rates(numbers) if are_rates else statistics.fmean(within),
            capped_std=statistics.pstdev(within),
        )
    except (OverflowError, ZeroDivisionError):  # values that no clock gives
        return None


def over_runs(runs: Sequence[Statistic | None]) -> Statistic | None:
    """Summarize the statistics of a point's runs: n runs, the mean of their means, and the mean of their capped means.

    For a single run, return its own statistic. None if any run's statistic is missing.
    """
    if len(runs) == 1:
        return runs[0]
    plain = summarize([run.mean if run else None for run in runs])
    robust = summarize([run.capped_mean if run else None for run in runs])
    return replace(plain, capped_mean=robust.mean, capped_std=robust.std) if plain and robust else None


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
    """Return the reason if a step of 1 to `num_steps` is missing. The cost is independent of `num_steps`."""
    numbers = {step.step for step in steps}
    first_missing = next(number for number in itertools.count(1) if number not in numbers)
    if first_missing > num_steps:
        return []
    done = sum(1 <= number <= num_steps for number in numbers)
    return [f"{done} of {num_steps} steps are in the log; the first missing is {first_missing}"]


def implausible(steps: Sequence[MeasuredStep], num_steps: int | None, device: object = None) -> list[str]:
    """Return the reasons why steps are implausible, one for each kind of number.

    num_steps: None if unknown. device: as the run reports it; None if it does not.
    """
    reasons = []
    last = math.inf if num_steps is None else num_steps
    if beyond := [step.step for step in steps if not 1 <= step.step <= last]:
        asked = "steps count from 1" if num_steps is None else f"steps 1 to {num_steps} were asked for"
        reasons.append(f"step {beyond[0]} is in the log; {asked}")
    for name, unit, lowest, highest in _bounds(device if isinstance(device, str) else None):
        values = ((step.step, getattr(step, name, None)) for step in steps)
        wrong = ((step, value) for step, value in values if value and math.isfinite(value))
        if bad := next(((step, value) for step, value in wrong if not lowest <= value <= highest), None):
            reasons.append(f"step {bad[0]}: {name} = {bad[1]:g}{unit} is not possible; {lowest:g} to {highest:g} is")
    return reasons


@lru_cache(maxsize=64)
def _bounds(device: str | None) -> tuple[tuple[str, str, float, float], ...]:
    """Return (name, unit, least, most) of every checked number."""
    gpu = find_gpu(device) if device else None
    known = [gpu] if gpu is not None and gpu.is_known else gpus().values()
    highest_peak = max(peak for each in known for peak in each.peak_tflops.values())
    return (
        ("step_time_s", " s", 1e-6, 30 * 86400.0),  # 30 days
        ("tflops_per_gpu", "", 0.0, 2.0 * highest_peak),
        ("peak_memory_gib", " GiB", 0.0, 2.0**20),
        ("grad_norm", "", 0.0, math.inf),
    )
