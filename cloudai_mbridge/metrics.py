"""Measures of a run: a field of `Metrics` each, their statistics, and plausibility checks.

Reports, tables, exports, gates and the page follow these fields.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

from pydantic import StrictInt

from cloudai_mbridge.estimate.hardware import find_gpu, gpus
from cloudai_mbridge.files.documents import Number
from cloudai_mbridge.logs import SKIPPED, StepRecord

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


_MOST_STEPS = 10**15


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


def first_step(run: Mapping[str, Any], steps: Sequence[StepRecord]) -> int:
    """Return the step that the training began with: that behind the checkpoint that it has loaded, else 1.

    run: the training's record of its start, whose `first_iteration` counts unless a step of the log is earlier.
    """
    first = run.get("first_iteration")
    if not isinstance(first, int) or isinstance(first, bool) or not 1 <= first <= _MOST_STEPS:
        return 1
    return first if all(step.step >= first for step in steps) else 1


def missing_steps(steps: Sequence[StepRecord], num_steps: int, first: int = 1) -> list[str]:
    """Return the reason if a step of `first` to `num_steps` is missing. The cost is independent of `num_steps`."""
    if first > max(num_steps, 1):
        return [
            f"nothing was left to train: the checkpoint is at step {first - 1} of max_steps = {num_steps}; use more"
        ]
    numbers = {step.step for step in steps}
    first_missing = next(number for number in itertools.count(first) if number not in numbers)
    if first_missing > num_steps:
        return []
    done = sum(first <= number <= num_steps for number in numbers)
    asked = f"{num_steps} steps" if first == 1 else f"{num_steps - first + 1} steps from {first} on"
    return [f"{done} of {asked} are in the log; the first missing is {first_missing}"]


def implausible(steps: Sequence[StepRecord], num_steps: int | None, device: object = None) -> list[str]:
    """Return the reasons why steps are implausible, one for each kind of number.

    num_steps: None if unknown. device: as the run reports it; None if it does not.
    """
    reasons = []
    last = math.inf if num_steps is None else num_steps
    if beyond := [step.step for step in steps if not 1 <= step.step <= last]:
        asked = "steps count from 1" if num_steps is None else f"steps 1 to {num_steps} were configured"
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


PRIMARY = "step_time_s"
_UNIT_ENDINGS = {"s": "_s", "GiB": "_gib"}  # of names of columns and fields


class Direction(StrEnum):
    """Better direction of a metric. More of LOWER, less of HIGHER and any change of SAME is for the worse."""

    LOWER = "lower"
    HIGHER = "higher"
    SAME = "same"

    @property
    def worse(self) -> tuple[int, ...]:
        """The signs of changes for the worse."""
        return {Direction.LOWER: (1,), Direction.HIGHER: (-1,), Direction.SAME: (1, -1)}[self]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure, by its field of `Metrics`.

    name: of the field.
    label, unit: in tables; equal if the label is the unit.
    short: label for narrow columns.
    direction: which change of it is for the worse.
    about: what it is, in a few words.
    step: field of a step that it is taken from; default: the measure's name.
    over: which steps: those after the warm-up (a `Statistic`), the largest or the last of all (a number).
    is_rate: work per time; rates are averaged by their times.
    work: field of `Metrics` with the work of a step, which is divided by `step`.
    noise_floor: least relative noise between runs that a gate believes; 0 for times.
    width: columns of a terminal from which its tables have the measure; None: never.
    """

    name: str = ""
    label: str
    unit: str
    short: str = ""
    direction: Direction
    about: str
    step: str = ""
    over: Literal["counted", "largest", "last"] = "counted"
    is_rate: bool = False
    work: str = ""
    noise_floor: float = 0.0
    width: int | None = 120

    @property
    def heading(self) -> str:
        return self.label if self.unit in ("", self.label) else f"{self.label} ({self.unit})"

    @property
    def short_heading(self) -> str:
        return replace(self, label=self.short or self.label).heading

    @property
    def is_statistic(self) -> bool:
        return self.over == "counted"

    @property
    def stem(self) -> str:
        """The name without its unit."""
        return self.name.removesuffix(_UNIT_ENDINGS.get(self.unit, ""))

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of its numbers: those of a statistic by their names in it, else one, by "".

        The measure's own name has the number that ranks and gates, and `std` its spread; the plain mean has a name of
        its own. The number of steps is the same for all statistics, so only the primary measure has it.
        """
        if not self.is_statistic:
            return {"": self.name}
        ending = self.name.removeprefix(self.stem)
        own = {"capped_mean": self.name, "capped_std": f"{self.stem}_std{ending}", "mean": f"{self.stem}_mean{ending}"}
        return own | ({"n": f"{self.stem}_n"} if self.name == PRIMARY else {})

    @property
    def column(self) -> str:
        """The column of the number that ranks."""
        return self.columns["capped_mean" if self.is_statistic else ""]

    def of(
        self, steps: Sequence[StepRecord], counted: Sequence[StepRecord], work: Mapping[str, float | None]
    ) -> Statistic | float | None:
        """Return the value of a run. A 0 is not measured: it is rounded, or a launcher's sentinel for unknown.

        counted: the steps after the warm-up. work: of a step, by field of `Metrics`.
        """
        if self.over == "last":
            trained = [step for step in steps if step.left_out != SKIPPED]
            return getattr(trained[-1], self.step) if trained else None
        values = [getattr(step, self.step) or None for step in (counted if self.is_statistic else steps)]
        if self.work:
            done = work[self.work]
            values = [done / value if done and value else None for value in values]
        found = summarize(values, are_rates=self.is_rate)
        return found if found is None or self.is_statistic else found.max

    def over_runs(self, runs: Sequence[Any]) -> Statistic | float | None:
        """Return the value of a point from the values of its runs: over all, the largest, or the mean of their last."""
        if self.is_statistic:
            return over_runs(runs)
        found = summarize(runs)
        return found and (found.mean if self.over == "last" else found.max)


def measured(label: str, unit: str, direction: Direction, about: str, **options: Any) -> Mapping[str, Measure]:
    """Return the metadata of a field of `Metrics` that is a measure; options: as in `Measure`."""
    return {"measure": Measure(label=label, unit=unit, direction=direction, about=about, **options)}


@dataclass(frozen=True)
class Metrics:
    """Measures of a run. A measure is None if unavailable, never a sentinel.

    window: (first, last) step counted; the `warmup_steps` steps before it are not.
    flops_per_step: model FLOPs of all GPUs together. flops_formula: its name and version; TFLOP/s can be compared only
    where it is the same. memory_kind: which memory was measured.
    A report of an earlier version may lack everything but `warmup_steps`.
    """

    warmup_steps: StrictInt
    window: tuple[StrictInt, StrictInt] | None = None
    step_time_s: Statistic | None = field(
        default=None, metadata=measured("step time", "s", Direction.LOWER, "time of a step after the warm-up", width=0)
    )
    tflops_per_gpu: Statistic | None = field(
        default=None,
        metadata=measured(
            "TFLOP/s/GPU", "TFLOP/s/GPU", Direction.HIGHER, "model TFLOP/s of a GPU", is_rate=True, width=60
        ),
    )
    tokens_per_s_per_gpu: Statistic | None = field(
        default=None,
        metadata=measured(
            *("tokens/s/GPU", "tokens/s/GPU", Direction.HIGHER, "tokens/s of a GPU"),
            step="step_time_s",
            work="tokens_per_step_per_gpu",
            is_rate=True,
            width=100,
        ),
    )
    first_loss: Number | None = None
    last_loss: Number | None = field(
        default=None,
        metadata=measured(
            "last loss", "", Direction.SAME, "loss of the last step", step="loss", over="last", width=100
        ),
    )
    peak_memory_gib: Number | None = field(
        default=None,
        metadata=measured(
            *("peak memory", "GiB", Direction.LOWER, "largest memory of any rank"),
            short="memory",
            over="largest",
            noise_floor=0.01,
            width=None,
        ),
    )
    memory_kind: str | None = None
    flops_formula: str | None = None
    flops_per_step: Number | None = None
    tokens_per_step_per_gpu: Number | None = None


_MEASURED = {each.name: each.metadata["measure"] for each in fields(Metrics) if "measure" in each.metadata}
MEASURES = tuple(replace(each, name=name, step=each.step or name) for name, each in _MEASURED.items())
TABLE_MEASURES = tuple(measure for measure in MEASURES if measure.over != "last")  # tables show losses as a pair


def counted_steps(steps: Sequence[StepRecord], warmup_steps: int) -> list[StepRecord]:
    """Return the steps of the statistics: those after the warm-up that are measurements."""
    return [step for step in steps if step.step > warmup_steps and not step.left_out]


def measure(
    steps: Sequence[StepRecord],
    warmup_steps: int,
    tokens_per_step_per_gpu: float | None,
    num_steps: int | None = None,
    *,
    flops_per_step: float | None = None,
    flops_formula: str | None = None,
    memory_kind: str | None = None,
) -> Metrics:
    """Compute the measures of a run's steps, up to the `num_steps` requested; the rest as in `Metrics`."""
    last = math.inf if num_steps is None else num_steps
    steps = [step for step in steps if step.step <= last]
    counted = counted_steps(steps, warmup_steps)
    work = {"tokens_per_step_per_gpu": tokens_per_step_per_gpu}
    found: dict[str, Any] = {each.name: each.of(steps, counted, work) for each in MEASURES}
    return Metrics(
        **found,
        warmup_steps=warmup_steps,
        window=(counted[0].step, counted[-1].step) if counted else None,
        first_loss=next((step.loss for step in steps if step.left_out != SKIPPED), None),
        memory_kind=None if found["peak_memory_gib"] is None else memory_kind,
        flops_formula=flops_formula,
        flops_per_step=flops_per_step,
        tokens_per_step_per_gpu=tokens_per_step_per_gpu,
    )
