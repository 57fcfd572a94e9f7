"""The progress log: Megatron-Bridge's lines, one per job start and per checkpoint, over all jobs of a training run."""

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

_NAME = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_FLOPS, _EXACT_FLOPS, _ITERATION = "Floating-point operations", "Exact floating-point operations", "Iteration"


def append_to_progress_log(save_dir: str, text: str, barrier: bool = True) -> None:
    """Append one line on rank 0. barrier: all ranks call it, and have got here before the line is written."""
    if barrier and dist.is_initialized():
        dist.barrier()
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    path = Path(save_dir) / _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    job = os.environ.get("SLURM_JOB_ID", "")
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now():{_TIME}}\tJob ID: {job}\t# GPUs: {_world_size()}\t{text}\n")


def get_start_time_from_progress_log(cfg: Any) -> tuple[datetime, float]:
    """Return when the first job of this world size started, and the model FLOPs that had been saved until then.

    A job of another world size in between restarts the search. Raises AssertionError: `checkpoint.save` is not set,
    or no job of this world size has started.
    """
    assert cfg.checkpoint.save is not None, "the progress log belongs to the checkpoints: set checkpoint.save"
    path = Path(cfg.checkpoint.save) / _NAME
    start: tuple[datetime, float] | None = None
    saved_flops = 0.0
    unfinished: dict[str, float] = {}  # iteration -> FLOPs of an asynchronous save
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(IndexError, ValueError):  # a damaged line is passed over
            stamp, _, ranks, event, *columns = line.strip().split("\t")
            time, world_size = datetime.strptime(stamp, _TIME), int(_value(ranks, "# GPUs"))
            if event == "Saved checkpoint":
                saved_flops = _flops(columns)
            elif event == "Saving async checkpoint":
                unfinished[_value(columns[0], _ITERATION)] = _flops(columns)
            elif event == "Saved async checkpoint":
                saved_flops = unfinished.pop(_value(columns[0], _ITERATION), saved_flops)
            if world_size != _world_size():
                start = None
            elif event == "Starting job" and start is None:
                start = (time, saved_flops)
    assert start is not None, f"{path}: no job with {_world_size()} ranks has started"
    return start


def _value(column: str, name: str) -> str:
    found, _, value = column.partition(": ")
    if found != name:
        raise ValueError(f"{found!r} is not {name!r}")
    return value


def _flops(columns: list[str]) -> float:
    """Return the FLOPs at full precision, rounded to three digits in logs of Megatron-Bridge itself."""
    values = dict(column.partition(": ")[::2] for column in columns)
    return float(values.get(_EXACT_FLOPS) or values.get(_FLOPS, ""))


def compute_throughputs_and_append_to_progress_log(state: Any, num_floating_point_operations_so_far: float) -> None:
    """Append the line of a checkpoint, with the rates of this job and of all jobs since the world size changed.

    Every rank must call it. No-op without `checkpoint.save`. FLOPs are the model's, of the whole training so far.
    """
    checkpoint = state.cfg.checkpoint
    if checkpoint.save is None:
        return
    if dist.is_initialized():
        dist.barrier()
        if dist.get_rank() != 0:
            return
    flops, now, progress = num_floating_point_operations_so_far, datetime.now(), state.train_state
    first_start, first_flops = get_start_time_from_progress_log(state.cfg)
    job = _tflops_per_gpu(flops - state.flops_at_start, now.timestamp() - state.start_time)
    cumulative = _tflops_per_gpu(flops - first_flops, (now - first_start).total_seconds())
    tokens = progress.consumed_train_samples * state.cfg.model.seq_length
    columns = (
        "Saving async checkpoint" if checkpoint.async_save else "Saved checkpoint",
        f"{_ITERATION}: {progress.step}",
        f"Job throughput: {job:.1f} TFLOP/s/GPU",
        f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU",
        f"{_FLOPS}: {flops:.2e}",
        f"Tokens (in billions): {tokens / 1e9:.2f}",
        f"{_EXACT_FLOPS}: {flops:.17g}",
    )
    append_to_progress_log(checkpoint.save, "\t".join(columns), barrier=False)


def _tflops_per_gpu(flops: float, seconds: float) -> float:
    return flops / (seconds * 1e12 * _world_size()) if seconds > 0 else 0.0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
