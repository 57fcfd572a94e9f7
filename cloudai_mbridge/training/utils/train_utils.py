"""Report a finished step."""

import math
from datetime import datetime

import torch
import torch.distributed as dist

from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.utils.flops import flops_per_token
from cloudai_mbridge.training.utils.log_lines import (
    StepReport,
    render_iteration,
    render_step_record,
    render_step_time,
    write_line,
)
from cloudai_mbridge.training.utils.required import required


def training_log(
    state: GlobalState,
    loss_dict: dict[str, torch.Tensor],
    step_time_s: float,
    learning_rate: float | None,
    grad_norm: float | None,
    loss_scale: float,
    skipped_iteration: int,
) -> None:
    """Print the step's lines: the step time on rank 0, losses and the full record on the last rank, which has them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank not in (0, world - 1):
        return
    losses = {key: float(value) for key, value in loss_dict.items()}
    report = StepReport(
        step=state.train_state.step,
        train_iters=required(state.cfg.train.train_iters),
        step_time_s=step_time_s,
        tflops_per_gpu=flops_per_step(state) / step_time_s / world / 1e12,
        consumed_samples=state.train_state.consumed_train_samples,
        global_batch_size=required(state.cfg.train.global_batch_size),
        learning_rate=learning_rate,
        loss_scale=loss_scale,
        losses=losses,
        grad_norm=grad_norm,
        num_zeros=None,
        skipped_iterations=skipped_iteration,
        nan_iterations=int(any(not math.isfinite(value) for value in losses.values())),
    )
    if rank == 0:
        write_line(render_step_time(report))
    if rank == world - 1:
        write_line(render_iteration(report, datetime.now()))
        write_line(render_step_record(report))


def flops_per_step(state: GlobalState) -> int:
    """Model FLOPs of one global batch over all ranks."""
    tokens = required(state.cfg.train.global_batch_size) * int(state.cfg.model.seq_length)
    return flops_per_token(state.cfg.model, getattr(state.cfg.model, "mtp_num_layers", None) or 0) * tokens
