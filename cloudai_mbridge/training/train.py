"""The training loop."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func

from cloudai_mbridge.training.cpu import megatron_device
from cloudai_mbridge.training.device import current_device
from cloudai_mbridge.training.hang import HangWatch
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.step_timer import StepTimer
from cloudai_mbridge.training.utils.required import required
from cloudai_mbridge.training.utils.train_utils import training_log


def train(
    forward_step_func: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    data_iterator: Any,
    state: GlobalState,
    watch: HangWatch,
) -> None:
    """Train until `train_iters` steps are done. Every rank calls it."""
    for chunk in model:
        chunk.train()
    timer = StepTimer()
    while state.train_state.step < required(state.cfg.train.train_iters):
        with timer:
            loss_dict, skipped, grad_norm = train_step(
                forward_step_func, data_iterator, model, optimizer, scheduler, state
            )
        state.train_state.step += 1
        state.train_state.consumed_train_samples += required(state.cfg.train.global_batch_size)
        learning_rate = get_canonical_lr_for_logging(optimizer.param_groups)
        step_time_s = timer.slowest_rank_s()
        training_log(state, loss_dict, step_time_s, learning_rate, grad_norm, _loss_scale(optimizer), skipped)
        watch.step_done()


def train_step(
    forward_step_func: Any, data_iterator: Any, model: list[Any], optimizer: Any, scheduler: Any, state: GlobalState
) -> tuple[dict[str, torch.Tensor], int, float | None]:
    """Run one optimizer step over one global batch.

    Returns:
        (mean losses, on the last pipeline stage only; 1 if the optimizer skipped the step, else 0; gradient norm).
    """
    with megatron_device():
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=state.cfg.model.seq_length,
            micro_batch_size=state.cfg.train.micro_batch_size,
            forward_only=False,
        )
        update_successful, grad_norm, _ = optimizer.step()
        if update_successful:
            scheduler.step(increment=required(state.cfg.train.global_batch_size))
    return reduce_losses(losses), int(not update_successful), None if grad_norm is None else float(grad_norm)


def reduce_losses(losses: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Turn the micro-batches' [sum, tokens] pairs into means over the global batch; `{}` off the last stage."""
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    reduced = {}
    for key in losses[0]:
        pair = torch.stack([micro_batch[key] for micro_batch in losses]).sum(0).to(current_device())
        dist.all_reduce(pair, group=mpu.get_data_parallel_group(with_context_parallel=True))
        reduced[key] = pair[0] / pair[1].clamp(min=1)
    return reduced


def _loss_scale(optimizer: Any) -> float:
    return float(optimizer.get_loss_scale().item())
