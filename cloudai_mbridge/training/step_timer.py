"""Time of one training step, of the slowest rank."""

import time

import torch
import torch.distributed as dist

from cloudai_mbridge.training.device import current_device, synchronize


class StepTimer:
    """Time what runs inside `with`: ranks start together, the device is drained before and after."""

    def __init__(self) -> None:
        self._start = 0.0
        self._elapsed_s = 0.0

    def __enter__(self) -> None:
        synchronize()
        dist.barrier()
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        synchronize()
        self._elapsed_s = time.perf_counter() - self._start

    def slowest_rank_s(self) -> float:
        """Return the longest time of any rank. A collective: every rank calls it."""
        elapsed = torch.tensor(self._elapsed_s, dtype=torch.float64, device=current_device())
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed.item()
