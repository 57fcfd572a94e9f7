"""This rank's device, and agreement on numbers across ranks.

The process group's backend decides the device: NCCL means the current GPU, all others the CPU. Every rank of a group
has to call a collective; a group of one rank costs nothing.
"""

import math
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CPUINFO = Path("/proc/cpuinfo")
_stands_for_all: torch.device | None = None


def use_device(device: torch.device | None) -> None:
    """Have `current_device` return this one, whatever the backend; None: as usual (`training.dry`)."""
    global _stands_for_all
    _stands_for_all = device


def current_device() -> torch.device:
    """Return the device of this rank. The default process group must be up."""
    if _stands_for_all is not None:
        return _stands_for_all
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def bind_local_device(backend: str, *, sees_one: bool = False) -> None:
    """Take this rank's GPU, or its share of the CPU cores; a single process takes OMP_NUM_THREADS of them, if set.

    sees_one: the launcher shows each process one GPU, which is device 0. torchrun sets that variable to 1 for several
    ranks on a node, whatever the number of cores.
    """
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if backend == "nccl":
        torch.cuda.set_device(0 if sees_one else local_rank)
    elif local_size > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))


def synchronize() -> None:
    """Wait until this rank's device has finished its queued work."""
    if current_device().type != "cpu":
        torch.cuda.synchronize()


def describe_device() -> str:
    """Name the hardware, as a report should."""
    if current_device().type != "cpu":
        return str(torch.cuda.get_device_name())
    model = ""
    with suppress(OSError):
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
        if named := re.search(r"(?m)^model name\s*:[ \t]*(\S.*?)[ \t]*$", text):
            model = " ".join(named[1].split())
    model = model or platform.processor()  # its architecture, empty if unknown
    return f"CPU{f' {model}' if model else ''} ({torch.get_num_threads()} threads per rank)"


def reduce_max_stat_across_model_parallel_group(stat: float | None, mp_group: Any) -> float | None:
    """Return the greatest value of the group's ranks; NaN if any has NaN, None if none has a value.

    A flag next to the value marks its presence, so that no number is a sentinel. A collective.
    """
    if mp_group.size() == 1:
        return None if stat is None else float(stat)
    value = -math.inf if stat is None or math.isnan(stat) else float(stat)
    is_nan = stat is not None and math.isnan(stat)
    greatest, has_value, has_nan = largest(value, stat is not None, is_nan, group=mp_group)
    if not has_value:
        return None
    return math.nan if has_nan else greatest


def logical_and_across_model_parallel_group(input: bool, mp_group: Any) -> bool:
    """Return whether `input` is truthy on every rank of the group. A collective."""
    if mp_group.size() == 1:
        return bool(input)
    return not largest(not input, group=mp_group)[0]


def reduce_max_memory_across_pp_group(memory_report: dict[str, int | float], pp_group: Any) -> dict[str, int | float]:
    """Return the report with the greatest value of the group's ranks for every key, in one collective.

    All ranks must have the same keys in the same order. Integers come back as integers, exact up to 2^53. The same
    object comes back if nothing is to be reduced.
    """
    if not memory_report or not dist.is_available() or not dist.is_initialized():
        return memory_report
    size = getattr(pp_group, "size", None)
    if not callable(size) or size() <= 1:
        return memory_report
    return {
        key: round(greatest) if isinstance(value, int) and not isinstance(value, bool) else greatest
        for (key, value), greatest in zip(
            memory_report.items(), largest(*memory_report.values(), group=pp_group), strict=True
        )
    }


def largest(*values: float, group: Any = None) -> list[float]:
    """Return the largest of any rank of the group (None: of all), value by value, in one collective."""
    if dist.get_world_size(group) == 1:
        return [float(value) for value in values]
    reduced = torch.tensor([float(value) for value in values], dtype=torch.float64, device=current_device())
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return list(reduced.tolist())
