"""The most memory that this process has held so far: the accelerator's where there is one, else the host's.

On a GPU it is what PyTorch's allocator has reserved, fragments included: what has to fit. On a CPU it is the resident
set. Both are of the whole process since its start, and never fall.
"""

import re
import resource
import sys
from pathlib import Path

import torch

from cloudai_mbridge.training.process.log_lines import RESERVED_MEMORY, RESIDENT_MEMORY

_GIB = 1 << 30
_STATUS = Path("/proc/self/status")


def memory_kind(device: torch.device) -> str:
    """Say what `peak_memory_gib` measures."""
    return RESIDENT_MEMORY if device.type == "cpu" else RESERVED_MEMORY


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory of this rank so far, in GiB."""
    if device.type != "cpu":
        return torch.cuda.max_memory_reserved(device) / _GIB
    return _resident_bytes() / _GIB


def _resident_bytes() -> int:
    """Return the peak of the resident set.

    Linux hands `ru_maxrss` down from the process that has started this one, so its own count comes first.
    """
    try:
        if match := re.search(rb"^VmHWM:\s*(\d+) kB", _STATUS.read_bytes(), re.MULTILINE):
            return int(match[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
