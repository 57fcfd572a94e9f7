"""Construction of the loop's objects: model, optimizer, scheduler, then the state of a checkpoint, then the data."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.fp8_utils import correct_amax_history_if_needed
from megatron.core.transformer.module import Float16Module

from cloudai_mbridge.training import callbacks
from cloudai_mbridge.training.checkpointing import (
    CheckpointLoadContext,
    create_checkpoint_manager,
    init_checkpointing_context,
    load_checkpoint,
    load_pretrained,
    local,
)
from cloudai_mbridge.training.checkpointing.load import convert_if_modelopt
from cloudai_mbridge.training.checkpointing.manager import has_checkpoint
from cloudai_mbridge.training.checkpointing.verify import on_first_rank
from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.data import build_data_iterators, build_for_epochs
from cloudai_mbridge.training.loop import graphs, param_hooks
from cloudai_mbridge.training.models.data_parallel import wrap_chunks
from cloudai_mbridge.training.models.initialization import initialize_weights, mark_shards
from cloudai_mbridge.training.optim import build_optimizer, build_scheduler
from cloudai_mbridge.training.peft import apply as adapters
from cloudai_mbridge.training.process.device import current_device
from cloudai_mbridge.training.profiling import (
    connect_tensor_inspection,
    start_memory_history_recording,
    start_tensor_inspection,
)
from cloudai_mbridge.training.reporting.progress_log import append_to_progress_log
from cloudai_mbridge.training.resilience import fault_tolerance
from cloudai_mbridge.training.resilience.rerun_machine import initialize_rerun
from cloudai_mbridge.training.resilience.straggler import NVRxStragglerDetectionManager
from cloudai_mbridge.training.startup.prepare import take_vocabulary
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer


@dataclass
class SetupOutput:
    """A run ready to train; an iterator is a list of them with virtual pipeline stages, as Megatron wants it."""

    state: GlobalState
    model: list[Any]
    optimizer: Any
    scheduler: Any
    train_data_iterator: Any
    valid_data_iterator: Any
    test_data_iterator: Any
    checkpointing_context: dict[str, Any]


def setup(state: GlobalState) -> SetupOutput:
    """Build everything on every rank. The process groups must be up."""
    config = state.cfg
    initialize_rerun(config)
    if config.ft is not None:
        fault_tolerance.setup(config, state)
        fault_tolerance.maybe_setup_simulated_fault(config.ft)
    if config.nvrx_straggler is not None and config.nvrx_straggler.enabled:
        state.nvrx_straggler_manager = NVRxStragglerDetectionManager(config.nvrx_straggler)
    start_memory_history_recording(config.profiling)
    if config.logger.log_progress and config.checkpoint.save:
        append_to_progress_log(config.checkpoint.save, "Starting job")
    state.tokenizer = build_tokenizer(config)  # again: the configuration may have changed since the first one
    if config.model.vocab_size is None:
        take_vocabulary(config.model, state.tokenizer.vocab_size)
    # The learning rate schedule needs the number of iterations in the epochs
    datasets = None if config.train.num_epochs is None else build_for_epochs(config, state.tokenizer)
    start_tensor_inspection(config.tensor_inspect)
    model = build_model(config, partial(load_pretrained, state))
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer)
    connect(state, model, optimizer)
    context, iteration = _load(state, model, optimizer, scheduler)
    if iteration:
        fault_tolerance.on_checkpoint_loaded(is_local_chkpt=context.get(local.LOADED, False), global_state=state)
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    callbacks.fire("on_data_init_start", state.callback_manager, state, model, **parts)
    train, valid, test = build_data_iterators(state, len(model), datasets)
    state.open_loggers()
    connect_tensor_inspection(config.tensor_inspect, model, state)
    return SetupOutput(state, model, optimizer, scheduler, train, valid, test, context)


def connect(state: GlobalState, model: list[Any], optimizer: Any) -> None:
    """Give the schedule what it calls: timers, the scale of the loss, reductions and gathers of the wrappers."""
    config = state.cfg
    megatron_config = model[0].config
    megatron_config.timers = config.optimizer.timers = state.timers
    megatron_config.grad_scale_func = optimizer.scale_loss
    megatron_config.finalize_model_grads_func = finalize_model_grads
    if config.ddp.overlap_grad_reduce:
        megatron_config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if config.dist.align_grad_reduce:
            megatron_config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
    if config.ddp.overlap_param_gather and config.ddp.align_param_gather:
        megatron_config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])
    if config.optimizer.reuse_grad_buf_for_mxfp8_param_ag and config.ddp.overlap_param_gather:
        for chunk in model:
            setattr(chunk, param_hooks.STAGE, partial(quantized.stage, optimizer))


def _load(state: GlobalState, model: list[Any], optimizer: Any, scheduler: Any) -> tuple[dict[str, Any], int]:
    """Load the checkpoint, if any; return the context shared by all saves, and the iteration."""
    config = state.cfg.checkpoint
    if config.custom_manager_class is None:
        context = init_checkpointing_context(config)
        return context, load_checkpoint(state, model, optimizer, scheduler, checkpointing_context=context)[0]
    manager = state.checkpoint_manager = create_checkpoint_manager(config)
    context = getattr(manager, "checkpointing_context", {})
    if local.newest(config, context) < 0 and not on_first_rank(partial(has_checkpoint, config)):
        return context, 0
    return context, manager.load(CheckpointLoadContext(state, model, optimizer, scheduler))[0]


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def build_model(config: ConfigContainer, load_weights: Callable[[list[Any]], None] = lambda _: None) -> list[Any]:
    """Build the chunks, one per virtual pipeline stage. The configuration must be validated, the groups up.

    load_weights: loads the weights that adapters leave as they are; only called with adapters.
    """
    stages = config.model.virtual_pipeline_model_parallel_size
    is_dry, chunks = current_device().type == "meta", list[Any]()
    is_meta = is_dry or getattr(config.model, "init_model_with_meta_device", False)
    for stage in range(stages) if stages else (None,):
        with torch.device("meta") if is_meta else nullcontext():
            chunk = config.model.provide(vp_stage=stage)
        if not is_meta:
            chunk.to(current_device())
        mark_shards(chunk)
        initialize_weights(chunk, config.model, config.rng.seed)
        convert_if_modelopt(config, chunk)
        chunks.append(chunk)
    for hook in config.model.pre_wrap_hooks:
        chunks = hook(chunks)
    if config.peft is not None:
        load_weights(chunks)
        adapters.apply(chunks, config.peft, config.rng.seed)
    if config.model.bf16 or config.model.fp16:
        chunks = [Float16Module(config.model, chunk) for chunk in chunks]
    correct_amax_history_if_needed(chunks)  # which Transformer Engine 1 spoils in moving FP8 parameters
    with graphs.gradient_stream(config):
        return wrap_chunks(config, chunks)
