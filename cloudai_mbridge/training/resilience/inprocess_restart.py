"""Start the training again inside its processes after a fault, with NVIDIA Resiliency Extension."""

import os
import socket
import threading
import warnings
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
from torch.distributed.distributed_c10d import PrefixStore, Store

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.resilience import InProcessRestartConfig
from cloudai_mbridge.training.resilience.packages import nvrx

_STORE_TIMEOUT = timedelta(seconds=300)
_HOOK_TIMEOUT = timedelta(seconds=10)
# In seconds; passed on under their own names
_DURATIONS = [each.name for each in fields(InProcessRestartConfig) if each.type is float]


def maybe_wrap_for_inprocess_restart(
    fn: Callable[..., Any], config: ConfigContainer, state: Any
) -> tuple[Callable[..., Any], Store | None]:
    """Return `fn`, restarted after a fault on any rank, and the store to call it with; or `fn` as it came and None.

    Every rank must call it, before it starts torch.distributed, in the environment that torchrun sets (MASTER_ADDR,
    MASTER_PORT, RANK, WORLD_SIZE; ports MASTER_PORT + 1 and + 2 are taken). The returned function is called as
    `restarted(..., store=store)`; each attempt gets as `store` a part of its own of that store, and has to start
    torch.distributed on it, with RANK and WORLD_SIZE read again.

    Raises RuntimeError: torch.distributed is initialized already. ImportError: the package is not installed.
    """
    restart = config.inprocess_restart
    if restart is None or not restart.enabled:
        return fn, None
    if dist.is_initialized():
        raise RuntimeError("in-process restart must wrap the training before torch.distributed is initialized")
    wrapper = _wrapper(restart, state, on_gpu=config.dist.distributed_backend == "nccl")

    def attempt(*args: Any, store: Any, call_wrapper: Any = None, **kwargs: Any) -> Any:
        return fn(*args, store=PrefixStore(str(call_wrapper.iteration), store), **kwargs)

    # the package gives its wrapper to the parameter that is annotated with its class
    attempt.__annotations__["call_wrapper"] = nvrx("inprocess").CallWrapper
    return wrapper(attempt), _outer_store()


def _outer_store() -> Store:
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        is_master=os.environ.get("RANK", "0") == "0",
        timeout=_STORE_TIMEOUT,
        wait_for_workers=True,
    )
    return store


def _wrapper(restart: InProcessRestartConfig, state: Any, *, on_gpu: bool) -> Any:
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "").lower() not in ("error", "fatal"):
        warnings.warn("set TORCH_CPP_LOG_LEVEL=error: torch's stores warn of every wait that times out", stacklevel=3)
    inprocess = nvrx("inprocess")
    nested, ranks, finalize = inprocess.nested_restarter, inprocess.rank_assignment, inprocess.finalize
    active = restart.active_world_size or int(os.environ.get("WORLD_SIZE", 1))
    layers = [ranks.Layer(min_ranks=active, max_ranks=active, flag=ranks.LayerFlag.RESERVE)]
    if restart.granularity == "node":  # a node is lost as a whole
        per_node = torch.cuda.device_count() if on_gpu else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        sizes = {"min_ranks": per_node, "max_ranks": per_node, "flag": ranks.LayerFlag.RESERVE}
        layers.append(ranks.Layer(**sizes, key_or_fn=lambda _: socket.gethostname()))
    if on_gpu:
        hook = partial(finalize.ThreadedFinalize, timeout=_HOOK_TIMEOUT)
        hooks = [hook(fn=torch.cuda.empty_cache)] if restart.empty_cuda_cache else []
        ends = inprocess.Compose(hook(fn=reset_for_restart, args=(state,)), *hooks)
    else:  # ThreadedFinalize refuses to run without a GPU
        ends = _finalize_on_cpu(finalize.Finalize, state)
    healthy = inprocess.health_check.CudaHealthCheck(timeout=_HOOK_TIMEOUT)
    if restart.max_rank_faults is not None:
        faults = inprocess.health_check.FaultCounter(max_rank_faults=restart.max_rank_faults)
        healthy = inprocess.Compose(healthy, faults)
    return inprocess.Wrapper(
        store_kwargs={"timeout": _STORE_TIMEOUT, "port": int(os.environ["MASTER_PORT"]) + 2},
        initialize=inprocess.Compose(
            inprocess.initialize.RetryController(max_iterations=restart.max_iterations, min_world_size=active),
            nested.NestedRestarterHandlingCompleted(),
        ),
        abort=inprocess.Compose(
            inprocess.abort.AbortTransformerEngine(),
            inprocess.abort.AbortTorchDistributed(),
            nested.NestedRestarterHandlingStarting(),
        ),
        completion=nested.NestedRestarterFinalized(),
        terminate=nested.NestedRestarterAborted(),
        finalize=ends,
        health_check=healthy,
        rank_assignment=ranks.Tree(layers=layers),
        monitor_process_logfile=_monitor_logfile(restart),
        **{name: timedelta(seconds=getattr(restart, name)) for name in _DURATIONS},
    )


def _finalize_on_cpu(base: Any, state: Any) -> Any:
    class ResetState(base):  # type: ignore[misc]
        def __call__(self, restart_state: Any) -> Any:
            thread = threading.Thread(target=reset_for_restart, args=(state,), daemon=True)
            thread.start()
            thread.join(_HOOK_TIMEOUT.total_seconds())
            if thread.is_alive():
                raise TimeoutError(f"the state of the failed attempt was not reset within {_HOOK_TIMEOUT}")
            return restart_state

    return ResetState()


def _monitor_logfile(restart: InProcessRestartConfig) -> str | None:
    """Return the log of Slurm's process 0; the other processes have none."""
    rank, local_rank = os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_LOCALID", "0")
    if restart.monitor_process_logdir is None or rank != "0":
        return None
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID", "")
    name = f"monitor_{job}_{socket.gethostname()}_{rank}_{local_rank}.log"
    return str(Path(restart.monitor_process_logdir).absolute() / name)


def reset_for_restart(state: Any) -> None:
    """Drop the remains of an attempt in this process: our state, and Megatron's global objects."""
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    state.reset_for_restart()
