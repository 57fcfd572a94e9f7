"""Hang or kill one rank on purpose, to see that the run's monitors notice."""

import os
import random
import signal
import threading
import time

import torch
import torch.distributed as dist

from cloudai_mbridge.training.config.resilience import FaultToleranceConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line

_SIGNALS = {"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}
_JITTER = 0.2  # of the base delay
_chance = random.SystemRandom()  # the run's seeded generators stay as they are, and each attempt differs


def maybe_setup_simulated_fault(ft_config: FaultToleranceConfig | None) -> None:
    """Let one rank stop or die after `simulated_fault_base_delay` seconds and up to a fifth more.

    Every rank must call it, once the process group is up. Which rank: the configured one, or one at random.

    Raises:
        ConfigError: the configured rank is not a rank of this run.
    """
    if ft_config is None or not ft_config.simulate_fault:
        return
    if _agreed_rank(ft_config.simulated_fault_rank) != dist.get_rank():
        return
    kind = ft_config.simulated_fault_type
    if kind == "random":
        kind = _chance.choice(("rank_hung", "rank_killed"))
    delay = ft_config.simulated_fault_base_delay * (1 + _JITTER * _chance.random())
    write_line(f"Simulated fault: {kind} on rank {dist.get_rank()} in {delay:.1f} s")
    threading.Thread(target=_strike, args=(kind, delay), name="simulated-fault", daemon=True).start()


def _agreed_rank(configured: int | None) -> int:
    if configured is not None:
        if not 0 <= configured < dist.get_world_size():
            raise ConfigError(
                f"ft.simulated_fault_rank={configured}: this run has the ranks 0 to {dist.get_world_size() - 1}"
            )
        return configured
    rank = torch.tensor([_chance.randrange(dist.get_world_size())], device=current_device())
    dist.broadcast(rank, 0)
    return int(rank.item())


def _strike(kind: str, delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), _SIGNALS[kind])
