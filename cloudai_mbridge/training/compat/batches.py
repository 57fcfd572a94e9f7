"""The batch ramp and a context-parallel rank's share of a batch.

From 0.18 on the ramp is a schedule of steps (`rampup_batch_size` is then taken with a warning, not followed), and
Megatron has a flag for hybrid context parallelism.
"""

import inspect
import math
from typing import Any

from megatron.core import num_microbatches_calculator as calculators
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_batch_on_this_cp_rank

from cloudai_mbridge.training.errors import ConfigError

_SCHEDULE = "step_batch_size_schedule"
_HAS_SCHEDULE = _SCHEDULE in inspect.signature(calculators.init_num_microbatches_calculator).parameters
_HYBRID = "is_hybrid_cp"
_CP_OPTIONS = {_HYBRID: False} if _HYBRID in inspect.signature(get_batch_on_this_cp_rank).parameters else {}


def count_micro_batches(rank: int, train: Any, replicas: int) -> None:
    """Set up Megatron's count of micro-batches for `train`, a TrainingConfig."""
    options = _options(train, train.rampup_batch_size, train.micro_batch_size, replicas)
    calculators.init_num_microbatches_calculator(rank, **options)


def batch_size_calculator(train: Any, ramp: list[int] | None, micro_batch_size: int, replicas: int) -> Any:
    """Return a calculator of its own, which logs nothing."""
    options = _options(train, ramp, micro_batch_size, replicas)
    return calculators._build_num_microbatches_calculator(-1, **options)


def check_ramp(train: Any, replicas: int) -> None:
    """Refuse a ramp that does not lead to the global batch size, in whole micro-batches, with any release.

    ConfigError: names the values and the remedy.
    """
    ramp, full = train.rampup_batch_size, train.global_batch_size
    if ramp is None:
        return
    where = f"train.rampup_batch_size = {ramp}"
    if len(ramp) != 3 or min(ramp) < 1:
        raise ConfigError(f"{where}: three positive numbers are needed: first size, increment, samples of the ramp")
    first, increment, _ = ramp
    if first > full or (full - first) % increment:
        raise ConfigError(
            f"{where} does not lead to train.global_batch_size = {full}:"
            f" {full} - {first} has to be a multiple of {increment}"
        )
    if train.decrease_batch_size_if_needed:
        if _HAS_SCHEDULE:
            raise ConfigError(
                "train.decrease_batch_size_if_needed = True with rampup_batch_size needs Megatron-Core 0.17 or older;"
                " set one of them off"
            )
        return
    part = train.micro_batch_size * replicas
    if first % part or (full > first and increment % part):
        raise ConfigError(
            f"{where}: first size and increment have to be multiples of micro_batch_size x data-parallel size ="
            f" {train.micro_batch_size} x {replicas}"
        )


def _sizes(ramp: list[int], full: int) -> dict[int, int]:
    """Return samples -> batch size from then on, of [first size, increment, samples of the ramp]."""
    first, increment, samples = ramp
    number = (full - first) // increment
    return {math.ceil(samples * step / number) if number else 0: first + step * increment for step in range(number + 1)}


def steps_of_ramp(ramp: list[int], full: int) -> str:
    """Write [first size, increment, samples of the ramp] as "SAMPLES:SIZE ..." up to the full size."""
    return " ".join(f"{start}:{size}" for start, size in _sizes(ramp, full).items())


def samples_after(iterations: int, train: Any, replicas: int) -> int:
    """Return the samples of the first iterations of `train`, a TrainingConfig whose ramp `check_ramp` has passed."""
    full = train.global_batch_size
    if train.rampup_batch_size is None:
        return int(iterations * full)
    part = (train.micro_batch_size or 1) * replicas if train.decrease_batch_size_if_needed else 1
    sizes = _sizes(train.rampup_batch_size, full)
    consumed = 0
    for size, end in zip(sizes.values(), [*list(sizes)[1:], None], strict=True):
        batch = size - size % part
        steps = iterations if end is None else min(iterations, max(0, -(-(end - consumed) // batch)))
        consumed += steps * batch
        iterations -= steps
    return int(consumed)


def _options(train: Any, ramp: list[int] | None, micro_batch_size: int, replicas: int) -> dict[str, Any]:
    options = {
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": replicas,
        "decrease_batch_size_if_needed": train.decrease_batch_size_if_needed,
    }
    if ramp is not None and ramp[0] == train.global_batch_size:
        ramp = None  # 0.16 would divide by the number of its steps
    if not _HAS_SCHEDULE:
        return {**options, "rampup_batch_size": ramp}
    if ramp is None:
        return options
    return {**options, _SCHEDULE: steps_of_ramp(ramp, train.global_batch_size)}


def batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Cut tensors of whole, unpacked sequences to this rank's two chunks."""
    group = mpu.get_context_parallel_group()  # without it, 0.18 takes all ranks for the group
    return dict(get_batch_on_this_cp_rank(batch, cp_group=group, **_CP_OPTIONS))
