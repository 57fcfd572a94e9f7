"""Readings and periodic actions after a step: reports, checks of the replicas' weights, garbage collection."""

import gc
import hashlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.loop.param_hooks import without_forward_pre_hooks
from cloudai_mbridge.training.process.device import current_device, largest, synchronize
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.profiling import handle_profiling_stop
from cloudai_mbridge.training.reporting.step_flops import flops_of_batch
from cloudai_mbridge.training.state import GlobalState


class StepFlops:
    """Counts the model FLOPs of the steps; those since the last report are for the straggler detector."""

    def __init__(self, state: GlobalState) -> None:
        self._state = state
        self.since_last_log: float = 0.0
        state.flops_at_start = state.train_state.floating_point_operations_so_far

    def add(self, batch_size: int) -> int:
        """Count a step over `batch_size` sequences, all ranks together; return its FLOPs."""
        model: Any = self._state.cfg.model
        flops = flops_of_batch(model, batch_size, self._state.step_seq_length or int(model.seq_length))
        self.since_last_log += flops
        return flops


def learning_rates(optimizer: Any, config: ConfigContainer) -> tuple[float | None, float | None]:
    """Return (learning rate, that of the embedding and output layer if it is decoupled)."""
    usual = decoupled = None
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        if config.optimizer.decoupled_lr is not None and not group.get("default_config", True):
            decoupled = group["lr"]
        else:
            usual = group["lr"]
    return usual, decoupled


def loss_scale_of(optimizer: Any) -> float:
    """Return the optimizer's loss scale, 1 without one."""
    get_loss_scale = getattr(optimizer, "get_loss_scale", None)
    return 1.0 if get_loss_scale is None or getattr(optimizer, "is_stub_optimizer", False) else float(get_loss_scale())


def post_training_step_callbacks(
    model: list[Any],
    num_floating_point_operations_since_last_log_event: float,
    straggler_timer: Any,
    iteration: int,
    prof: Any,
    config: ConfigContainer,
    should_toggle_forward_pre_hook: bool,
    nsys_nvtx_context: Any = None,
) -> float:
    """Synchronise, report stragglers, compare the replicas' weights, stop profilers and collect garbage, if due.

    Returns the FLOPs since the straggler detector's last report: zero after one.
    """
    train = config.train
    if train.train_sync_interval and iteration % train.train_sync_interval == 0:
        synchronize()
    flops = num_floating_point_operations_since_last_log_event
    if iteration % config.logger.log_interval == 0 and config.straggler is not None and config.straggler.log_straggler:
        straggler_timer.report(flops, config.logger.log_interval)
        flops = 0.0
    interval = train.check_weight_hash_across_dp_replicas_interval
    if interval is not None and iteration % interval == 0:
        check_weights(model, iteration, should_toggle_forward_pre_hook)
    handle_profiling_stop(config.profiling, iteration, dist.get_rank(), prof, nsys_nvtx_context)
    if train.manual_gc and train.manual_gc_interval and iteration % train.manual_gc_interval == 0:
        gc.collect()
    return flops


def check_weights(model: list[Any], iteration: int, toggle_hooks: bool) -> None:
    """Leave the run if the replicas of a parameter differ. A collective. Raises AssertionError: they do."""
    with without_forward_pre_hooks(model) if toggle_hooks else nullcontext():
        assert check_param_hashes_across_dp_replicas(model), f"replicas have different weights at iteration {iteration}"
    dist.barrier()
    if dist.get_rank() == 0:
        write_line(f">>> Weight hashes match after {iteration} iterations...")


_MAX_NAMES = 5


def check_param_hashes_across_dp_replicas(model: list[Any]) -> bool:
    """Return whether every parameter has the same bits on all its replicas. A collective over all ranks.

    Dense parameters are replicated over the data- and context-parallel ranks, experts over the expert-data-parallel
    ranks. Every rank gets the same answer; a rank that differs from its replica 0 prints the first names.
    Copies each parameter to the host: too slow for every step.
    """
    named = [(f"chunk {i}: {name}", param) for i, chunk in enumerate(model) for name, param in chunk.named_parameters()]
    dense = {name: param for name, param in named if getattr(param, "allreduce", True)}
    experts = {name: param for name, param in named if name not in dense}
    differing = _differing(dense, mpu.get_data_parallel_group(with_context_parallel=True))
    differing += _differing(experts, mpu.get_expert_data_parallel_group())
    if differing:
        more = f" and {len(differing) - _MAX_NAMES} more" if len(differing) > _MAX_NAMES else ""
        names = ", ".join(differing[:_MAX_NAMES])
        write_line(f"rank {dist.get_rank()}: weights differ from those of the first replica: {names}{more}")
    return not largest(bool(differing))[0]


def _differing(params: dict[str, Any], group: Any) -> list[str]:
    """Return the names of the parameters whose hash is not that of the group's first rank."""
    if not params or group.size() == 1:
        return []
    mine = torch.stack([_hash(param) for param in params.values()]).to(current_device())
    first = mine.clone()
    dist.broadcast(first, group=group, group_src=0)
    equal = (mine == first).all(1).tolist()
    return [name for name, is_equal in zip(params, equal, strict=True) if not is_equal]


def _hash(param: Any) -> torch.Tensor:
    """Hash data type, shape and bits (for FP8 and FP4, of the dequantized values) into a CPU tensor of bytes."""
    data: Any = quantized.values(param.detach()).cpu().contiguous()
    digest = hashlib.blake2b(f"{data.dtype} {tuple(data.shape)}".encode(), digest_size=16)
    digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)
