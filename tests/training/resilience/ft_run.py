"""A run of 20 steps, two saves and one evaluation under the real rank monitor; the save directory is the argument."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.config.resilience import FaultToleranceConfig
from cloudai_mbridge.training.resilience import fault_tolerance as ft
from cloudai_mbridge.training.state import FaultToleranceState


def step(state: Any, seconds: float = 0.01) -> None:
    """Train one step."""
    ft.on_training_step_start(state)
    time.sleep(seconds)
    ft.on_training_step_end(state)


def save(state: Any) -> None:
    """Save a checkpoint."""
    ft.on_checkpointing_start(state)
    time.sleep(0.01)
    ft.on_checkpointing_end(False, state)


def main() -> None:
    """Train; with "hang" as the second argument, rank 1 hangs in its fourth step."""
    cpu.install()
    dist.init_process_group("gloo")
    cfg: Any = SimpleNamespace(
        ft=FaultToleranceConfig(enable_ft_package=True, calc_ft_timeouts=True),
        checkpoint=SimpleNamespace(save=sys.argv[1], async_save=False),
    )
    state: Any = SimpleNamespace(rank_monitor_client=None, fault_tolerance_state=FaultToleranceState())
    ft.setup(cfg, state)
    print(f"timeouts {state.rank_monitor_client.section_timeouts}", flush=True)
    ft.on_checkpoint_loaded(False, state)
    for number in range(20):
        step(state, 3600 if "hang" in sys.argv and number == 3 and dist.get_rank() == 1 else 0.01)
    save(state)
    for _ in range(3):
        ft.on_eval_step_start(state)
        time.sleep(0.01)
        ft.on_eval_step_end(state)
    save(state)
    ft.shutdown(state)
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
