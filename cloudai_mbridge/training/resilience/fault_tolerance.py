"""Report the sections `setup`, `step` and `checkpointing` to NVIDIA Resiliency Extension's rank monitor, which kills a
rank whose section stays open longer than its timeout; and simulate such a fault. Without a client every function
returns at once."""

import json
import logging
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.resilience import FaultToleranceConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.atomic import write_bytes
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.resilience.packages import nvrx

logger = logging.getLogger(__name__)

_WARMUP_ITERS = 1  # the first step compiles and allocates: it would teach a wrong timeout
_MIN_ITERS_FOR_STEP_TIMEOUT = 16


def setup(cfg: ConfigContainer, state: Any) -> None:
    """Connect this rank to its monitor and open the section `setup`. Every rank, once the process group is up.

    Timeouts that an earlier run learned are taken from `<checkpoint.save>/ft_state.json`. Raises ConfigError: no
    `checkpoint.save`, or no monitor to connect to.
    """
    if cfg.ft is None or not cfg.ft.enable_ft_package:
        return
    if not cfg.checkpoint.save:
        raise ConfigError("ft.enable_ft_package=true keeps its state next to the checkpoints: set checkpoint.save")
    seen = state.fault_tolerance_state
    seen.ft_state_path = os.path.join(cfg.checkpoint.save, "ft_state.json")
    seen.is_async_chkpt_enabled = bool(cfg.checkpoint.async_save)
    seen.is_calculating_timeouts = cfg.ft.calc_ft_timeouts
    client = nvrx("fault_tolerance").RankMonitorClient()
    if (path := Path(seen.ft_state_path)).exists():
        try:
            learned = dict(json.loads(path.read_text()))
        except ValueError as error:
            logger.warning("The timeouts in %s cannot be read (%s); the launcher's apply", path, error)
            learned = {}
        client.load_state_dict(learned)
    try:
        client.init_workload_monitoring()
    except Exception as error:
        raise ConfigError(
            f"ft.enable_ft_package=true, but this rank cannot reach its monitor ({error}): start the run with "
            "`ft_launcher`, or set ft.enable_ft_package=false"
        ) from error
    client.start_section("setup")
    seen.is_setup_section_open = True
    state.rank_monitor_client = client


def on_training_step_start(state: Any) -> None:
    """Open the section `step`, except for the first training step of the process."""
    _start_step(state, "seen_tr_iters_cnt")
    state.fault_tolerance_state.curr_eval_iter_idx = 0  # training continues: the next evaluation warms up again


def on_training_step_end(state: Any) -> None:
    """Close the section opened by `on_training_step_start`."""
    _end_step(state, "seen_tr_iters_cnt")


def on_eval_step_start(state: Any) -> None:
    """Open the section `step`, except for the first step of each evaluation."""
    _start_step(state, "curr_eval_iter_idx")


def on_eval_step_end(state: Any) -> None:
    """Close the section opened by `on_eval_step_start`."""
    _end_step(state, "curr_eval_iter_idx")


def _start_step(state: Any, counter: str) -> None:
    client, seen = state.rank_monitor_client, state.fault_tolerance_state
    if client is None:
        return
    _close_setup(client, seen)
    if getattr(seen, counter) >= _WARMUP_ITERS:
        client.start_section("step")


def _end_step(state: Any, counter: str) -> None:
    client, seen = state.rank_monitor_client, state.fault_tolerance_state
    if client is None:
        return
    if getattr(seen, counter) >= _WARMUP_ITERS:
        client.end_section("step")
    setattr(seen, counter, getattr(seen, counter) + 1)


def on_checkpointing_start(state: Any) -> None:
    """Open the section `checkpointing`."""
    if state.rank_monitor_client is not None:
        state.rank_monitor_client.start_section("checkpointing")


def on_checkpointing_end(is_async_finalization: bool, global_state: Any) -> None:
    """Close the section `checkpointing`; after a save, learn new timeouts. Every rank must call it: it reduces them.

    is_async_finalization: the section held only the check for an asynchronous save that may have ended.
    """
    client = global_state.rank_monitor_client
    if client is None:
        return
    client.end_section("checkpointing")
    if not is_async_finalization:
        global_state.fault_tolerance_state.seen_checkpoints_cnt += 1
        _maybe_update_timeouts(client, global_state.fault_tolerance_state)


def on_checkpoint_loaded(is_local_chkpt: bool, global_state: Any) -> None:
    """Note that `setup` read a checkpoint; a load from local memory does not show how long one can take."""
    if global_state.rank_monitor_client is not None:
        global_state.fault_tolerance_state.is_persistent_chkpt_loaded = not is_local_chkpt


def shutdown(state: Any) -> None:
    """Learn the last timeouts and leave the monitor; a second call does nothing. Every rank, with its process group."""
    client = state.rank_monitor_client
    if client is None:
        return
    _close_setup(client, state.fault_tolerance_state)
    _maybe_update_timeouts(client, state.fault_tolerance_state, is_closing=True)
    client.shutdown_workload_monitoring()
    state.rank_monitor_client = None


def _close_setup(client: Any, seen: Any) -> None:
    if seen.is_setup_section_open:
        client.end_section("setup")
        seen.is_setup_section_open = False


def _maybe_update_timeouts(client: Any, seen: Any, is_closing: bool = False) -> None:
    if not seen.is_calculating_timeouts:
        return
    enough = {  # observations of a section to set its timeout
        "setup": seen.is_persistent_chkpt_loaded,
        "step": seen.seen_tr_iters_cnt >= _MIN_ITERS_FOR_STEP_TIMEOUT,
        # an asynchronous save leaves its section long before it is written
        "checkpointing": seen.seen_checkpoints_cnt > 0 and not seen.is_async_chkpt_enabled,
    }
    sections = [section for section, is_enough in enough.items() if is_enough]
    out_of_section = is_closing and {"setup", "step"} <= set(sections) and seen.seen_checkpoints_cnt > 0
    if not sections and not out_of_section:
        return
    client.calculate_and_set_section_timeouts(selected_sections=sections, calc_out_of_section=out_of_section)
    if dist.get_rank() == 0 and seen.ft_state_path is not None:
        path = Path(seen.ft_state_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps(client.state_dict(), indent=2).encode())


_chance = random.SystemRandom()  # the run's seeded generators stay as they are, and each attempt differs


def maybe_setup_simulated_fault(ft_config: FaultToleranceConfig | None) -> None:
    """Let one rank stop or die after `simulated_fault_base_delay` seconds and up to a fifth more.

    Every rank must call it, once the process group is up. The rank is the configured rank or random. Raises
    ConfigError: the configured rank is not a rank of this run.
    """
    if ft_config is None or not ft_config.simulate_fault:
        return
    world_size, rank = dist.get_world_size(), ft_config.simulated_fault_rank
    if rank is None:
        drawn = torch.tensor([_chance.randrange(world_size)], device=current_device())
        dist.broadcast(drawn, 0)
        rank = int(drawn.item())
    elif not 0 <= rank < world_size:
        raise ConfigError(f"ft.simulated_fault_rank={rank}: this run has the ranks 0 to {world_size - 1}")
    if rank != dist.get_rank():
        return
    signals = {"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}
    kind = ft_config.simulated_fault_type
    if kind == "random":
        kind = _chance.choice(("rank_hung", "rank_killed"))
    delay = ft_config.simulated_fault_base_delay * (1 + 0.2 * _chance.random())
    write_line(f"Simulated fault: {kind} on rank {dist.get_rank()} in {delay:.1f} s")
    fault = threading.Timer(delay, os.kill, (os.getpid(), signals[kind]))
    fault.name, fault.daemon = "simulated-fault", True
    fault.start()
