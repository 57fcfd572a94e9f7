"""Series logged in addition to the losses: memory, gradient norms, run time, rates; peak memory; a step's FLOPs."""

import logging
import math
import re
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

from cloudai_mbridge.training.flops import num_floating_point_operations
from cloudai_mbridge.training.process.log_lines import RESERVED_MEMORY, RESIDENT_MEMORY

logger = logging.getLogger(__name__)

# The allocator's statistic -> its name in the logs. One name is misspelt, as in Megatron-Bridge, for compatibility
MEMORY_KEYS: dict[str, str] = {
    "allocated_bytes.all.current": "mem-allocated-bytes",
    "active_bytes.all.current": "mem-active-bytes",
    "inactive_split_bytes.all.current": "mem-inactive-bytes",
    "reserved_bytes.all.current": "mem-reserved-bytes",
    "allocated_bytes.all.peak": "mem-max-allocated-bytes",
    "active_bytes.all.peak": "mem-max-active-bytes",
    "inactive_split_bytes.all.peak": "mem-max-inactive-bytes",
    "reserved_bytes.all.peak": "mem-max-reserved-bytes",
    "num_alloc_retries": "mem-alloc-retires",
    "allocation.all.current": "mem-allocated-count",
}

_SECONDS = {"seconds": 1, "minutes": 60, "hours": 60 * 60, "days": 24 * 60 * 60}


def report_memory(memory_keys: dict[str, str] | None) -> dict[str, int | float]:
    """Return the GPU allocator's statistics of this rank under their log names; nothing on a CPU.

    memory_keys: statistic -> log name; None or empty: `MEMORY_KEYS`. Bytes become GB (1e9) with five significant
    digits, and "bytes" in their log name becomes "gigabytes". Statistics that the allocator lacks are left out.
    """
    stats = torch.cuda.memory_stats()
    report: dict[str, int | float] = {}
    for source, name in (memory_keys or MEMORY_KEYS).items():
        if source not in stats:
            continue
        if "bytes" in source:
            report[name.replace("bytes", "gigabytes")] = float(f"{stats[source] / 1e9:.5g}")
        else:
            report[name] = stats[source]
    return report


def report_l2_norm_grad(model: list[Any]) -> dict[str, float]:
    """Return the L2 norm of every parameter's gradient on this rank, and of them all together.

    It reads `main_grad`, Megatron's accumulation buffer; parameters whose `main_grad` is None are left out. A name that
    an earlier chunk has used gets the chunk's number: `l2_norm/grad/chunk1.<name>`. Raises AttributeError: a parameter
    without `main_grad`.
    """
    grads: dict[str, torch.Tensor] = {}
    for i, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            if parameter.main_grad is not None:
                key = f"l2_norm/grad/{name}"
                grads[f"l2_norm/grad/chunk{i}.{name}" if key in grads else key] = parameter.main_grad
    if not grads:
        return {"l2_norm/grad/global": 0.0}
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads.values()]).tolist()
    return {**dict(zip(grads, norms, strict=True)), "l2_norm/grad/global": math.hypot(*norms)}


def report_runtime(
    train_state: Any, start_time: int, seq_length: int, train_iters: int, time_unit: str = "seconds"
) -> dict[str, float]:
    """Return the run's time so far, an estimate of the rest, and the amount trained.

    start_time: seconds since the epoch. The estimate is infinite before the first step. Raises ValueError: `time_unit`
    is not one of seconds, minutes, hours, days.
    """
    if time_unit not in _SECONDS:
        raise ValueError(f"time_unit is {time_unit!r}; use one of {', '.join(_SECONDS)}")
    unit, elapsed = _SECONDS[time_unit], time.time() - start_time
    share = train_state.step / train_iters if train_iters else 0.0
    return {
        "time/remaining_estimate": elapsed / share * (1 - share) / unit if share else math.inf,
        "time/tokens": train_state.consumed_train_samples * seq_length,
        "time/samples": train_state.consumed_train_samples,
        "time/batches": train_state.step,
        "time/total": elapsed / unit,
    }


def report_throughput(
    train_config: Any, iteration: int, seq_length: int, history_wct: Sequence[float], window_size: int
) -> dict[str, float]:
    """Return the rates over the steps of `history_wct`, which holds the seconds at the end of each step.

    n times bound n - 1 steps. Empty with fewer than `window_size` times; device means per rank.
    """
    if len(history_wct) < window_size or len(history_wct) < 2:
        return {}
    seconds = history_wct[-1] - history_wct[0]
    if seconds <= 0:
        logger.warning("no throughput at iteration %d: %s s have passed over the window", iteration, seconds)
        return {}
    batches = len(history_wct) - 1
    samples = batches * train_config.global_batch_size
    counts = {"batches": batches, "samples": samples, "tokens": samples * seq_length}
    rates = {f"{name}_per_sec": count / seconds for name, count in counts.items() if name != "tokens" or count > 0}
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return {
        **{f"throughput/{name}": rate for name, rate in rates.items()},
        **{f"throughput/device/{name}": rate / world_size for name, rate in rates.items()},
        "throughput/micro_batch_size": train_config.micro_batch_size,
        "throughput/global_batch_size": train_config.global_batch_size,
    }


_GIB = 1 << 30
_STATUS = Path("/proc/self/status")


def memory_kind(device: torch.device) -> str:
    """Return the kind of memory that `peak_memory_gib` measures."""
    return RESIDENT_MEMORY if device.type == "cpu" else RESERVED_MEMORY


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory of this rank so far, in GiB."""
    if device.type != "cpu":
        return torch.cuda.max_memory_reserved(device) / _GIB
    # Linux hands `ru_maxrss` down from the process that has started this one, so its own count comes first
    with suppress(OSError):
        if match := re.search(rb"^VmHWM:\s*(\d+) kB", _STATUS.read_bytes(), re.MULTILINE):
            return int(match[1]) * 1024 / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / _GIB


def flops_per_step(state: Any, seq_length: int | None = None) -> int:
    """Return the model FLOPs of one step at the current batch size, which a ramp-up changes.

    seq_length: of its sequences, of which packed ones are parts; None: the model's.
    """
    model = state.cfg.model
    length = int(model.seq_length) if seq_length is None else seq_length
    return flops_of_batch(model, get_current_running_global_batch_size(), length, state.packed.of_step)


def flops_of_batch(model: Any, batch_size: int, seq_length: int, packed: tuple[int, int] | None = None) -> int:
    """Return the model FLOPs to train on `batch_size` sequences of `seq_length` tokens.

    packed: tokens of sequences that were packed into these, and the sum of the squares of their lengths: attention
    ends with each.
    """
    tokens = batch_size * seq_length
    counted, squares = packed or (tokens, tokens * seq_length)
    if counted != tokens:  # some were drawn twice, or by a part of the ranks
        squares = round(tokens * squares / counted)
    return num_floating_point_operations(SimpleNamespace(model=model), batch_size, tokens, squares)
