"""One training step: forward and backward over the global batch, then the optimizer. The forward step gets the run's
GlobalState, if an annotation or the name of the first parameter requests it."""

import inspect
import types
from collections.abc import Callable
from functools import partial, wraps
from typing import Annotated, Any, ForwardRef, Union, get_args, get_origin

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
    success, grad_norm, num_zeros = optimizer.step()
    group = mpu.get_model_parallel_group()  # the ranks of a replica agree on success and norm
    if not cfg.train.check_optimizer_step_success:
        success = True
    elif group.size() > 1:
        success = logical_and_across_model_parallel_group(success, group)
    grad_norm = None if grad_norm is None else float(grad_norm)
    if group.size() > 1 and not cfg.train.skip_sync_grad_norm_across_mp:
        grad_norm = reduce_max_stat_across_model_parallel_group(grad_norm, group)
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
    if not options.get("forward_only"):
        iterator = state.packed.counting(iterator)
    schedule = graphs.schedule(get_forward_backward_func(), state.cfg, options)
    schedule = with_second_try(schedule, state, model, optimizer)
    if (own := grid_groups()) is not None:  # not Megatron-Core's own groups
        options |= {"pg_collection": own, "p2p_communicator": P2PCommunicator(own.pp, model[0].config)}
    reports: list[Any] = schedule(
        forward_step_func=forward_step_func,
        data_iterator=iterator,
        model=model,
        num_microbatches=count,
        seq_length=seq_length,
        decoder_seq_length=seq_length,
        **{"micro_batch_size": state.cfg.train.micro_batch_size, **options},
    )
    return reports


def _micro_batches(data_iterator: Any, state: GlobalState, count: int) -> tuple[Any, int]:
    """Return the iterator that the schedule draws micro-batches from, and their sequence length.

    A loader of type "batch" yields a whole global batch, whose length may differ from step to step: it is split here.
    """
    model_length = int(state.cfg.model.seq_length)
    if state.cfg.dataset.dataloader_type != "batch":
        return data_iterator, model_length
    is_list, longest = isinstance(data_iterator, list), 0
    split: list[Any] = []
    for iterator in data_iterator if is_list else [data_iterator]:
        if iterator is None:
            split.append(None)
            continue
        batch = next(iterator)
        longest = max(longest, int(batch["tokens"].size(1)))
        parts = {key: value.chunk(count) if torch.is_tensor(value) else [value] * count for key, value in batch.items()}
        split.append(iter([{key: values[i] for key, values in parts.items()} for i in range(count)]))
    # The stages in the middle see no data, and take the longest of any pipeline stage. A collective with stages
    (greatest,) = largest(longest, group=mpu.get_pipeline_model_parallel_group())
    state.step_seq_length = seq_length = int(greatest) or model_length
    return split if is_list else split[0], seq_length


def reduce_losses(losses: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Reduce the micro-batches' values to one per key; `{}` off the last pipeline stage.

    [sum, tokens] pairs become the mean over the tokens of the global batch; a collective over data and context
    parallelism. Single values become their mean over this rank's micro-batches.

    ValueError: a value of any other size.
    """
    if not mpu.is_pipeline_last_stage(ignore_virtual=True) or not losses:
        return {}
    reduced: dict[str, torch.Tensor] = {}
    for key, first in losses[0].items():
        stacked = torch.stack([micro_batch[key].detach().reshape(-1).float() for micro_batch in losses])
        if stacked.size(1) not in (1, 2):
            raise ValueError(f"loss {key!r} has shape {tuple(first.shape)}; use one value or [sum, number of tokens]")
        if stacked.size(1) == 1:
            reduced[key] = stacked.mean()
        else:
            pair = stacked.sum(0)
            dist.all_reduce(pair, group=mpu.get_data_parallel_group(with_context_parallel=True))
            reduced[key] = pair[0] / pair[1].clamp(min=1)
    return reduced


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
    count = 1 if global_state.cfg.dataset.dataloader_type == "batch" else get_num_microbatches()
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(train_data_iterator):
        for iterator in train_data_iterator if isinstance(train_data_iterator, list) else [train_data_iterator]:
            if iterator is not None:  # a stage in the middle reads no data
                for _ in range(count):
                    next(iterator)


def max_attention_logit(model: list[Any], config: Any) -> float | None:
    """Return the largest logit since the last call, None unless `qk_clip` or `log_max_attention_logit` is set.

    With `qk_clip`, heads whose logit exceeds `qk_clip_threshold` get smaller query and key weights. A collective over
    all ranks then. config: the model's. Megatron-Core's own `clip_qk` finds the layers of a half-precision model only.
    """
    if not (config.qk_clip or config.log_max_attention_logit):
        return None
    found, layers = 0.0, []
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        layers += chunk.decoder.layers
    with torch.no_grad():
        for attention in (layer.self_attention for layer in layers):
            core: Any = getattr(attention, "core_attention", None)
            if getattr(core, "current_max_attn_logits", None) is None:  # no layer that counts them
                continue
            replicas = mpu.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(core.current_max_attn_logits, op=dist.ReduceOp.MAX, group=replicas)
            found = max(found, float(core.current_max_attn_logits.max()))
            if config.qk_clip:
                attention.clip_qk()
            core.current_max_attn_logits = None
    return largest(found)[0]


def with_second_try(schedule: Any, state: GlobalState, model: list[Any], optimizer: Any) -> Any:
    """Return Megatron's schedule of a batch, followed by its second try if tokens or stashed activations did not fit.

    The same schedule without `model.moe_expert_rank_capacity_factor`. The second try has no such limit, stashes
    nothing, and starts from empty gradients: nothing of the first one is left. schedule: wrapped for graphs of the
    full iteration, if any. optimizer: None in evaluation.
    """
    config = state.cfg.model
    if getattr(config, "moe_expert_rank_capacity_factor", None) is None:
        return schedule
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    copies = state.cfg.optimizer.reuse_grad_buf_for_mxfp8_param_ag and state.cfg.ddp.overlap_param_gather
    runner = PagedStashRunner(config, copies, model, optimizer, schedule)
    prepare = runner.prepare_for_rerun

    def without_graph(is_training: bool = True) -> None:
        """Delete the graph first, which reads the stash: the runner does that for a bare wrapper alone."""
        stage = "training" if is_training else "validation"
        if FullCudaGraphWrapper.cuda_graph[stage] is not None:
            FullCudaGraphWrapper.reset_cuda_graph(None, stage)  # all of its state is the class's
        prepare(is_training)

    runner.prepare_for_rerun = without_graph
    return runner


_STATE = "GlobalState"  # found by name: an annotation may be a string
_STATE_NAMES = ("state", "global_state")
_PASSED_BY_SCHEDULE = 2  # data iterator and model, in this order and by position
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def prepare_forward_step_func(forward_step_func: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Return a step that the schedules can call as `f(data_iterator, model)`. Prepare it once, use it in every step."""
    return maybe_inject_state(forward_step_func, state, needs_global_state_injection(forward_step_func))


def needs_global_state_injection(forward_step_func: Callable[..., Any]) -> bool:
    """Return whether a function, functor or partial requests the GlobalState and has not been given it yet.

    It does if any parameter is annotated with GlobalState, alone, in a union or as a string, or if the first one is
    called `state` or `global_state`. `*args` and `**kwargs` request nothing.
    """
    return _state_parameter(forward_step_func) is not None


def maybe_inject_state(
    forward_step_func: Callable[..., Any], state: Any, needs_injection: bool | None = None
) -> Callable[..., Any]:
    """Return the forward step with `state` bound, or the same object if nothing is bound.

    needs_injection: True binds the state in any case, as first argument if no parameter requests it; False never
    does; None inspects the signature.

    Raises TypeError: the parameter is in the position of the data iterator or the model.
    """
    if needs_injection is None:
        needs_injection = needs_global_state_injection(forward_step_func)
    if not needs_injection:
        return forward_step_func
    found = _state_parameter(forward_step_func)
    if found is None or found[0] == 0:
        return partial(forward_step_func, state)
    position, parameter = found
    is_in_the_way = parameter.kind is not inspect.Parameter.KEYWORD_ONLY and position < _PASSED_BY_SCHEDULE
    if is_in_the_way or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise TypeError(
            f"forward step: parameter {parameter.name!r} takes the {_STATE} but stands at position {position + 1},"
            " that cannot be bound by name; make it the first parameter"
        )
    return partial(forward_step_func, **{parameter.name: state})


def _state_parameter(function: Callable[..., Any]) -> tuple[int, inspect.Parameter] | None:
    """Return the parameter that requests the state, and its position (not 0 for a keyword-only parameter)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    bound = function.keywords if isinstance(function, partial) else {}  # a signature still shows these
    named = [(i, p) for i, p in enumerate(parameters) if p.kind not in _VARIADIC and p.name not in bound]
    for position, parameter in named:
        if _means_state(parameter.annotation):
            is_keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            return (max(position, _PASSED_BY_SCHEDULE) if is_keyword_only else position), parameter
    if named and named[0][0] == 0 and named[0][1].name in _STATE_NAMES:
        parameter = named[0][1]
        return (_PASSED_BY_SCHEDULE if parameter.kind is inspect.Parameter.KEYWORD_ONLY else 0), parameter
    return None


def _means_state(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return _STATE in annotation
    if isinstance(annotation, ForwardRef):
        return _STATE in annotation.__forward_arg__
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_means_state(part) for part in get_args(annotation))
    return getattr(annotation, "__name__", None) == _STATE


def with_own_reports(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward step whose loss function reports copies of values that share the loss's memory.

    A loss reported with `.detach()` alone would be logged divided by the number of micro-batches
    (megatron.core.pipeline_parallel.schedules.forward_step_calc_loss).
    """

    def apart(value: Any, loss: Any) -> Any:
        if not (torch.is_tensor(value) and torch.is_tensor(loss)):
            return value
        is_shared = value.untyped_storage().data_ptr() == loss.untyped_storage().data_ptr()
        return value.detach().clone() if is_shared else value

    def copying(loss_function: Callable[..., Any], output: Any, **options: Any) -> Any:
        result = loss_function(output, **options)
        if not isinstance(result, tuple) or not isinstance(result[-1], dict):
            return result  # not of training
        loss, *count, reports = result
        return loss, *count, {name: apart(value, loss) for name, value in reports.items()}

    @wraps(forward_step, updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = forward_step(*args, **kwargs)
        return output, None if loss_function is None else partial(copying, loss_function)

    return step
