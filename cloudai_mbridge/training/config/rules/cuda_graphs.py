"""Operations that a CUDA graph cannot hold: a value read on the host, a changing shape, a choice made once.

A replay repeats kernels and copies; Python does not run. Megatron-Core checks the modules that are captured, and these
rules the loop around them.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig

if TYPE_CHECKING:
    from cloudai_mbridge.training.config.container import ConfigContainer


def check_graphs(config: "ConfigContainer") -> None:
    """Check that graphs can hold the captured modules; if they are off, nothing downstream finds a request.

    AssertionError: the loss is read back inside a graph of the whole iteration.
    ValueError: every other conflicting field, and the remedy.
    """
    kind = cuda_graphs.implementation(config.model)
    if getattr(config.model, "cuda_graph_impl", None) == "none":
        cuda_graphs.capture_nothing(config.model)
    assert kind != cuda_graphs.FULL_ITERATION or not config.rerun_state_machine.check_for_nan_in_loss, (
        "a full_iteration CUDA graph cannot look at the loss; set rerun_state_machine.check_for_nan_in_loss=False"
    )
    problems = [*_of_the_optimizer(config)]
    if kind:
        problems += [*_of_attention(config), *_of_shapes(config, kind)]
    if kind == cuda_graphs.FULL_ITERATION:
        problems += _of_an_iteration(config)
    if kind == "transformer_engine":
        is_expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if is_expandable and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
            problems.append("PYTORCH_CUDA_ALLOC_CONF with expandable_segments:True (set NCCL_GRAPH_REGISTER=0 too)")
    if problems:
        raise ValueError(f"CUDA graphs ({kind or 'of the optimizer'}) cannot capture: {'; '.join(problems)}")


def _of_an_iteration(config: "ConfigContainer") -> Iterator[str]:
    """Yield settings that read values, or take times, between the first forward and the last backward of a step."""
    rerun, ddp, train, model = config.rerun_state_machine, config.ddp, config.train, config.model
    if rerun.check_for_spiky_loss:
        yield "rerun_state_machine.check_for_spiky_loss (set it to False)"
    if rerun.rerun_mode != "disabled":
        yield f"rerun_state_machine.rerun_mode = {rerun.rerun_mode!r} (use 'disabled')"
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        if getattr(ddp, name, False):
            yield f"ddp.{name} (set it to False)"
    if config.logger.timing_log_level > 0:
        yield f"logger.timing_log_level = {config.logger.timing_log_level} (use 0)"
    if config.straggler is not None and config.straggler.log_straggler:
        yield "straggler.log_straggler (set it to False)"
    if train.rampup_batch_size is not None or train.decrease_batch_size_if_needed:
        yield "a batch size that changes (remove train.rampup_batch_size and train.decrease_batch_size_if_needed)"
    if not ddp.overlap_param_gather:
        return
    if getattr(model, "cuda_graph_warmup_steps", 1) < 1:
        yield "the first step with ddp.overlap_param_gather (use model.cuda_graph_warmup_steps of at least 1)"
    if model.fp16:  # steps that are skipped until the loss scale fits, without the hooks that gather
        yield "fp16 with ddp.overlap_param_gather (use bf16, or set ddp.overlap_param_gather to False)"


def _of_attention(config: "ConfigContainer") -> Iterator[str]:
    """Yield settings that a captured attention would leave out of every replay."""
    model: Any = config.model
    if not cuda_graphs.captures_attention(model):
        return
    for name in ("log_max_attention_logit", "qk_clip"):
        if getattr(model, name, False):
            yield f"model.{name} with attention (set it to False, or capture other modules)"
    if not _is_packed(config):
        return
    if not cuda_graphs.captures_full_iteration(model):
        yield "the attention of packed sequences (capture other modules, or the full iteration)"
    elif model.context_parallel_size > 1:
        yield "packed sequences with context_parallel_size > 1 (use 1, or capture other modules than attention)"


def _of_shapes(config: "ConfigContainer", kind: str) -> Iterator[str]:
    """Yield settings that change the shapes, or the number, of micro-batches from step to step."""
    dataset: Any = config.dataset
    if isinstance(dataset, FinetuningDatasetConfig):
        specs: Any = dataset.packed_sequence_specs
        if not (dataset.dataset_kwargs or {}).get("pad_to_max_length", False):
            yield "samples of different lengths (set dataset.dataset_kwargs.pad_to_max_length to True)"
        if _is_packed(config) and cuda_graphs.captures_full_iteration(config.model) and not specs.pad_cu_seqlens:
            yield "bounds of packed sequences (set dataset.packed_sequence_specs.pad_cu_seqlens to True)"
    elif getattr(dataset, "pack_sequences_in_batch", False):
        yield "sequences packed in the batch (set dataset.pack_sequences_in_batch to False)"
    if config.train.rampup_batch_size is not None and config.model.pipeline_model_parallel_size > 1:
        yield "a pipeline whose number of micro-batches changes (remove train.rampup_batch_size)"
    own = config.validation.eval_micro_batch_size
    if kind == "local" and own not in (None, config.train.micro_batch_size):
        yield f"validation.eval_micro_batch_size = {own} (use that of training)"


def _is_packed(config: "ConfigContainer") -> bool:
    specs = getattr(config.dataset, "packed_sequence_specs", None)
    has_documents = getattr(config.dataset, "inter_document_masking", False)
    return has_documents or (specs is not None and specs.packed_sequence_size > 0)


def _of_the_optimizer(config: "ConfigContainer") -> Iterator[str]:
    """Yield settings that read values in the optimizer's step, or that the captured step would freeze."""
    optimizer, scheduler = config.optimizer, config.scheduler
    if not getattr(optimizer, "optimizer_cuda_graph", False):
        return
    field = "with optimizer.optimizer_cuda_graph"
    if optimizer.optimizer != "adam":
        yield f"optimizer.optimizer = {optimizer.optimizer!r} {field} (use 'adam')"
    if config.model.fp16:
        yield f"fp16 {field} (use bf16)"
    if config.logger.log_num_zeros_in_grad:
        yield f"logger.log_num_zeros_in_grad {field} (set it to False)"
    if config.logger.timing_log_level > 0:
        yield f"logger.timing_log_level = {config.logger.timing_log_level} {field} (use 0)"
    if scheduler.weight_decay_incr_style != "constant":
        yield f"scheduler.weight_decay_incr_style = {scheduler.weight_decay_incr_style!r} {field} (use 'constant')"
    if getattr(config.model, "cuda_graph_warmup_steps", 1) < 1:
        yield f"the first step {field} (use model.cuda_graph_warmup_steps of at least 1)"
