"""The GPU allocator's history, for torch's memory viewer (https://pytorch.org/memory_viz). Nothing of it on a CPU."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.config.profiling import ProfilingConfig, is_speaker, should_profile_rank
from cloudai_mbridge.training.process.log_lines import write_line


def start_memory_history_recording(profiling: ProfilingConfig | None) -> None:
    """Record every allocation of this rank's GPU from now on, with Python stacks. Call it before the model is built.

    Running out of memory writes a snapshot to `{base}_oom_rank-{rank}{ext}` of `memory_snapshot_path`. No-op if it
    is off or for other ranks (an empty `profile_ranks` means all); on a CPU one line is logged.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    if not _records(profiling, rank):
        return
    assert profiling is not None
    if not torch.cuda.is_available():
        if is_speaker(profiling, rank):
            write_line("memory history: it needs a GPU; this run has none, nothing is recorded")
        return
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=100_000)
    base, ext = os.path.splitext(profiling.memory_snapshot_path)
    path = Path(f"{base}_oom_rank-{rank}{ext}")
    write_line(f"memory history: recording on rank {rank}; out of memory writes {path}")
    core: Any = torch._C
    core._cuda_attach_out_of_memory_observer(lambda *_: _write_snapshot(path))  # called before torch raises


def dump_memory_snapshot(config: ProfilingConfig | None, iteration: int, rank: int) -> None:
    """Write the snapshot `{base}_{rank}{ext}` at the end of the window. iteration: steps done."""
    if config is not None and iteration == config.profile_step_end:
        write_memory_snapshot(config, rank)


def write_memory_snapshot(config: ProfilingConfig, rank: int) -> None:
    """Write the snapshot `{base}_{rank}{ext}` now, if a history is recorded."""
    if _records(config, rank) and torch.cuda.is_available():
        base, ext = os.path.splitext(config.memory_snapshot_path)
        _write_snapshot(Path(f"{base}_{rank}{ext}"))


def _records(config: ProfilingConfig | None, rank: int) -> bool:
    return config is not None and config.record_memory_history and should_profile_rank(config, rank)


def _write_snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
