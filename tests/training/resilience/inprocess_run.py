"""A training that fails on rank 1 in as many attempts as the argument says, restarted by the real package on gloo."""

import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.config.resilience import InProcessRestartConfig
from cloudai_mbridge.training.resilience.inprocess_restart import maybe_wrap_for_inprocess_restart

FAILURES = int(sys.argv[1])
attempts: list[str] = []
resets: list[None] = []


def body(word: str, store: Any, times: int = 1) -> str:
    """Sum over the ranks on the store of this attempt."""
    attempts.append(word)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    if rank == 1 and len(attempts) <= FAILURES:
        raise RuntimeError(f"simulated failure {len(attempts)}")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    print(f"attempt {len(attempts)} of rank {rank} done, {len(resets)} resets, {word * times}", flush=True)
    dist.destroy_process_group()
    return word


def main() -> None:
    """Train under the wrapper, with at most 3 attempts."""
    cpu.install()
    restart = InProcessRestartConfig(
        enabled=True,
        max_iterations=3,
        granularity="rank",
        monitor_thread_interval=0.1,
        monitor_process_interval=0.1,
        last_call_wait=0.1,
    )
    cfg: Any = SimpleNamespace(inprocess_restart=restart, dist=SimpleNamespace(distributed_backend="gloo"))
    state: Any = SimpleNamespace(reset_for_restart=lambda: resets.append(None))
    restarted, store = maybe_wrap_for_inprocess_restart(body, cfg, state)
    assert restarted("ok", store=store, times=2) == "ok"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        maybe_wrap_for_inprocess_restart(body, cfg, state)
    except RuntimeError:
        print("refused after initialization")


if __name__ == "__main__":
    main()
