"""The one device rule: the process group's backend decides. NCCL means the current GPU, all others the CPU."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

_CPUINFO = Path("/proc/cpuinfo")


def current_device() -> torch.device:
    """Return the device of this rank. The default process group must be up."""
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
