"""One training step: forward and backward over the global batch, then the optimizer."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.rerun_state_machine import get_rerun_state_machine

from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.config.container import required
from cloudai_mbridge.training.loop import graphs, param_hooks
from cloudai_mbridge.training.loop.attention_logits import max_attention_logit
from cloudai_mbridge.training.loop.paged_stash import with_second_try
from cloudai_mbridge.training.process.device import (
    largest,
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from cloudai_mbridge.training.process.groups import grid_groups
from cloudai_mbridge.training.state import GlobalState

StepResult = tuple[dict[str, torch.Tensor], int, bool, bool, int, float | None, int | None]


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    global_state: GlobalState,
) -> StepResult:
    """Run one optimizer step over one global batch. Every rank calls it.

    forward_step_func: takes (data_iterator, model); see `prepare_forward_step_func`.

    Returns:
        (mean losses, on the last pipeline stage only; 1 if the optimizer skipped the step, else 0; whether to save a
        checkpoint; whether to leave; the exit code then; gradient norm; number of zeros in the gradients).
    """
    cfg = global_state.cfg
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(data_iterator):
        losses = _forward_backward(forward_step_func, data_iterator, model, optimizer, global_state)
    should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
    if should_exit:
        return {}, True, should_checkpoint, True, exit_code, None, None
    _release_memory(cfg.train.empty_unused_memory_level >= 1)
    timer = global_state.timers("optimizer", log_level=1)
    timer.start(barrier=cfg.logger.barrier_with_L1_time)
    success, grad_norm, num_zeros = _agree(cfg.train, *optimizer.step())
    global_state.max_attention_logit = max_attention_logit(model, cfg.model)
    timer.stop()
    if success:
        scheduler.step(increment=samples_per_step(global_state))
    _release_memory(cfg.train.empty_unused_memory_level >= 2)
    zeros = None if num_zeros is None or not cfg.logger.log_num_zeros_in_grad else int(num_zeros)
    return reduce_losses(losses), int(not success), should_checkpoint, False, exit_code, grad_norm, zeros


def samples_per_step(state: GlobalState) -> int:
    """Return the sequences of one step over all ranks, at the current number of micro-batches."""
    micro_batch = required(state.cfg.train.micro_batch_size)
    return int(mpu.get_data_parallel_world_size() * micro_batch * get_num_microbatches())


def _forward_backward(
    forward_step_func: Any, data_iterator: Any, model: list[Any], optimizer: Any, state: GlobalState
) -> list[dict[str, torch.Tensor]]:
    cfg = state.cfg
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # Without hooks nothing would be gathered from the buffer, and it would stay in the gradients. A graph of the whole
    # iteration gathers in any case
    if param_hooks.are_enabled(model) or FullCudaGraphWrapper.cuda_graph.get("training") is not None:
        _handle_mxfp8_param_buffer_copy(
            optimizer, cfg.optimizer.reuse_grad_buf_for_mxfp8_param_ag, cfg.ddp.overlap_param_gather
        )
    count, options = get_num_microbatches(), {"optimizer": optimizer, "forward_only": False}
    return run_schedule(forward_step_func, data_iterator, model, state, count, **options)


def run_schedule(
    forward_step_func: Any,
    data_iterator: Any,
    model: list[Any],
    state: GlobalState,
    count: int,
    optimizer: Any = None,
    **options: Any,
) -> list[Any]:
    """Run `count` micro-batches through Megatron's schedule; return the loss functions' reports of each."""
    iterator, seq_length = _micro_batches(data_iterator, state, count)
    schedule = graphs.schedule(get_forward_backward_func(), state.cfg, options)
    schedule = with_second_try(schedule, state, model, optimizer)
    reports: list[Any] = schedule(
        forward_step_func=forward_step_func,
        data_iterator=iterator,
        model=model,
        num_microbatches=count,
        seq_length=seq_length,
        decoder_seq_length=seq_length,
        **_groups(model),
        **{"micro_batch_size": state.cfg.train.micro_batch_size, **options},
    )
    return reports


def _groups(model: list[Any]) -> dict[str, Any]:
    """Return the groups of the schedule, if not Megatron-Core's own."""
    if (own := grid_groups()) is None:
        return {}
    return {"pg_collection": own, "p2p_communicator": P2PCommunicator(own.pp, model[0].config)}


def _micro_batches(data_iterator: Any, state: GlobalState, count: int) -> tuple[Any, int]:
    """Return the iterator that the schedule draws micro-batches from, and their sequence length.

    A loader of type "batch" yields a whole global batch, whose length may differ from step to step: it is split here.
    """
    model_length = int(state.cfg.model.seq_length)
    if state.cfg.dataset.dataloader_type != "batch":
        return data_iterator, model_length
    is_list = isinstance(data_iterator, list)
    pairs = [_split(iterator, count) for iterator in (data_iterator if is_list else [data_iterator])]
    split = [iterator for iterator, _ in pairs]
    # The stages in the middle see no data, and take the longest of any pipeline stage. A collective with stages
    longest = largest(max(length for _, length in pairs), group=mpu.get_pipeline_model_parallel_group())
    state.step_seq_length = seq_length = int(longest[0]) or model_length
    return split if is_list else split[0], seq_length


def _split(iterator: Any, count: int) -> tuple[Iterator[dict[str, Any]] | None, int]:
    if iterator is None:
        return None, 0
    batch = next(iterator)
    chunks = {key: value.chunk(count) if torch.is_tensor(value) else [value] * count for key, value in batch.items()}
    micro = [{key: parts[i] for key, parts in chunks.items()} for i in range(count)]
    return iter(micro), int(batch["tokens"].size(1))


def _agree(train: Any, success: bool, grad_norm: float | None, num_zeros: int | None) -> tuple[bool, Any, Any]:
    """Make the ranks of a model replica agree on whether the step succeeded, and on its gradient norm."""
    group = mpu.get_model_parallel_group()
    if not train.check_optimizer_step_success:
        success = True
    elif group.size() > 1:
        success = logical_and_across_model_parallel_group(success, group)
    norm = None if grad_norm is None else float(grad_norm)
    if group.size() > 1 and not train.skip_sync_grad_norm_across_mp:
        norm = reduce_max_stat_across_model_parallel_group(norm, group)
    return success, norm, num_zeros


def reduce_losses(losses: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Reduce the micro-batches' values to one per key; `{}` off the last pipeline stage.

    [sum, tokens] pairs become the mean over the tokens of the global batch; a collective over data and context
    parallelism. Single values become their mean over this rank's micro-batches.

    ValueError: a value of any other size.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True) or not losses:
        return {}
    return {key: _reduce(key, [micro_batch[key] for micro_batch in losses]) for key in losses[0]}


def _reduce(key: str, values: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([value.detach().reshape(-1).float() for value in values])
    if stacked.size(1) == 1:
        return stacked.mean()
    if stacked.size(1) != 2:
        raise ValueError(f"loss {key!r} has shape {tuple(values[0].shape)}; use one value or [sum, number of tokens]")
    pair = stacked.sum(0)
    dist.all_reduce(pair, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return pair[0] / pair[1].clamp(min=1)


def _handle_mxfp8_param_buffer_copy(
    optimizer: Any, reuse_grad_buf_for_mxfp8_param_ag: bool, overlap_param_gather: bool
) -> None:
    """Copy the main parameters into the buffer that MXFP8 parameters are gathered from and gradients reduced in."""
    if reuse_grad_buf_for_mxfp8_param_ag and overlap_param_gather:
        quantized.copy_main_params(optimizer)


def _release_memory(wanted: bool) -> None:
    if wanted and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _should_skip_and_handle_iteration(global_state: GlobalState, train_data_iterator: Any) -> bool:
    """Pass over a step named in `train.iterations_to_skip` (0-based): take its data, count it, train nothing."""
    if global_state.train_state.step not in global_state.cfg.train.iterations_to_skip:
        return False
    _dummy_train_step(global_state, train_data_iterator)
    samples = samples_per_step(global_state)
    global_state.train_state.step += 1
    global_state.train_state.consumed_train_samples += samples
    global_state.train_state.skipped_train_samples += samples
    return True


def _dummy_train_step(global_state: GlobalState, train_data_iterator: Any) -> None:
    """Draw a step's data and drop it."""
    count = 1 if global_state.cfg.dataset.dataloader_type == "batch" else get_num_microbatches()
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(train_data_iterator):
        for iterator in train_data_iterator if isinstance(train_data_iterator, list) else [train_data_iterator]:
            if iterator is not None:  # a stage in the middle reads no data
                for _ in range(count):
                    next(iterator)
