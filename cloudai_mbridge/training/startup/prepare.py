"""Preparation of a configuration for this process: adaptation to the device, refusals, derived values, validation."""

import os
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.compat.machine import GPU, TRANSFORMER_ENGINE
from cloudai_mbridge.training.compat.versions import installed_release
from cloudai_mbridge.training.config.container import ConfigContainer, required
from cloudai_mbridge.training.config.rules.validate import runtime_config_update
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.mixed_precision import MixedPrecisionConfig
from cloudai_mbridge.training.models import engine_layers
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider
from cloudai_mbridge.training.models.hybrid_provider import HybridModelProvider
from cloudai_mbridge.training.models.layer_specs import (
    has_transformer_engine,
    local_layer_spec,
    modelopt_transformer_layer_spec,
)
from cloudai_mbridge.training.schema.known_names import OPTIMIZER_DTYPES
from cloudai_mbridge.training.schema.not_done import asked_for, needed
from cloudai_mbridge.training.startup.adapters import asked_of_adapters
from cloudai_mbridge.training.startup.documents import asked_of_documents
from cloudai_mbridge.training.startup.kernels import check_kernels
from cloudai_mbridge.training.startup.sharding import asked_of_sharding, check_offload

_CHANGED = "_changed_by_prepare"


def prepare(config: ConfigContainer) -> dict[str, Any]:
    """Prepare in place; return the changes for the device, "section.field" -> new value.

    May be called again: changes of an earlier call that still hold are returned as well.

    ConfigError: a rule is broken, or the loop does not support a configured feature.
    """
    _check_values(config)
    refuse_unsupported(config)
    try:
        adapted = adapt_to_device(config)
        before = _plain_values(config)
        had_sequence_parallel = getattr(config.model, "sequence_parallel", False)
        runtime_config_update(config)
    except ConfigError:
        raise
    except Exception as error:  # whatever a rule of Megatron-Core raises, the configuration is at fault
        raise ConfigError(f"{' '.join(str(error).split())} ({type(error).__name__})") from error
    refuse_unsupported(config)
    check_offload(config)
    _check_parallelism(config)
    _check_dispatcher(config.model)
    check_kernels(config.model)
    _check_fused_experts(config.model)
    if had_sequence_parallel and not config.model.sequence_parallel:
        adapted["model.sequence_parallel"] = False
    earlier = {path: value for path, value in vars(config).get(_CHANGED, {}).items() if _holds(config, path, value)}
    after = _plain_values(config) if config.mixed_precision is not None else {}
    overwritten = {path: str(value) for path, value in after.items() if value != before.get(path)}
    changed = earlier | adapted | overwritten
    setattr(config, _CHANGED, changed)
    return changed


def _holds(config: ConfigContainer, path: str, value: Any) -> bool:
    section, _, name = path.partition(".")
    return str(getattr(getattr(config, section), name, None)) == str(value)


def _plain_values(config: ConfigContainer) -> dict[str, Any]:
    """Return the fields that a mixed-precision recipe may overwrite."""
    sections = {"model": config.model, "optimizer": config.optimizer, "ddp": config.ddp}
    names = [each.name for each in fields(MixedPrecisionConfig)]
    return {
        f"{s}.{name}": getattr(target, name)
        for s, target in sections.items()
        for name in names
        if hasattr(target, name)
    }


def _check_values(config: ConfigContainer) -> None:
    """Refuse values that would fail later, on every rank, with an unclear message."""
    optimizer, train = config.optimizer, config.train
    for name, value in (("micro_batch_size", train.micro_batch_size), ("global_batch_size", train.global_batch_size)):
        if value is None or value < 1:
            raise ConfigError(f"train.{name} = {value} is not a number of sequences; use at least 1")
    if optimizer.lr is None or not 0 <= (0.0 if optimizer.min_lr is None else optimizer.min_lr) <= optimizer.lr:
        raise ConfigError(f"optimizer: lr = {optimizer.lr} and min_lr = {optimizer.min_lr}; use 0 <= min_lr <= lr")
    if optimizer.min_lr is None:
        optimizer.min_lr = 0.0
    for name in ("log_interval", "tensorboard_log_interval"):
        if (value := getattr(config.logger, name)) < 1:
            raise ConfigError(f"logger.{name} = {value} is not a number of steps; use at least 1")
    path = config.logger.save_config_filepath
    if path and not os.access(Path(path).absolute().parent, os.W_OK):
        raise ConfigError(f"logger.save_config_filepath = {path!r}: its directory cannot be written")


def _check_parallelism(config: ConfigContainer) -> None:
    """Refuse sizes that pipeline, data and tensor parallelism cannot split."""
    model: Any = config.model
    if model.virtual_pipeline_model_parallel_size is not None and not model.overlap_p2p_comm:
        # Megatron-Core would train them wrongly and report no error
        raise ConfigError("comm_overlap.overlap_p2p_comm = False: virtual pipeline stages need it; remove it")
    total, micro = required(config.train.global_batch_size), required(config.train.micro_batch_size)
    replicas = required(config.data_parallel_size)
    if total % (micro * replicas):
        raise ConfigError(
            f"train.global_batch_size = {total} is not a multiple of micro_batch_size x data-parallel size ="
            f" {micro} x {replicas}: the global batch size has to hold whole micro-batches"
        )
    evaluated, own_micro = config.eval_batch_sizes
    if min(evaluated, own_micro) < 1 or evaluated % (own_micro * replicas):
        raise ConfigError(
            f"validation.eval_global_batch_size = {evaluated} is not a multiple of eval_micro_batch_size x"
            f" data-parallel size = {own_micro} x {replicas}; null means as in training"
        )
    size, tp = model.vocab_size, model.tensor_model_parallel_size
    if size is not None and not model.should_pad_vocab and size % tp:
        raise ConfigError(
            f"model.vocab_size = {size} is not a multiple of model.tensor_model_parallel_size = {tp};"
            " use a multiple, or set model.should_pad_vocab=True"
        )


def _check_dispatcher(model: Any) -> None:
    """Refuse a backend whose package is missing: Megatron-Core fails in the middle of building the model."""
    dispatcher, backend = model.moe_token_dispatcher_type, getattr(model, "moe_flex_dispatcher_backend", None)
    is_missing = backend in ("deepep", "hybridep") and find_spec("deep_ep") is None
    if model.num_moe_experts and dispatcher == "flex" and is_missing:
        raise ConfigError(
            f"model.moe_flex_dispatcher_backend = {backend!r} needs the package deep_ep, which is not installed;"
            ' install it, or set model.moe_token_dispatcher_type = "alltoall" (cmd_args.moe_flex_dispatcher_backend'
            ' = "None")'
        )


def _check_fused_experts(model: Any) -> None:
    """Refuse experts without a form of fused operations: Megatron-Core fails in the middle of building the model."""
    if not (model.num_moe_experts and getattr(model, "use_transformer_engine_op_fuser", False)):
        return
    etp = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    is_named = os.environ.get(_FUSED_EXPERTS, "0") != "0"  # Megatron-Core 0.19 refuses without, on any GPU
    needs = {
        f"model.expert_tensor_parallel_size = 1, not {etp}": etp == 1,
        "model.moe_grouped_gemm = True": model.moe_grouped_gemm,
        "model.moe_apply_probs_on_input = False": not model.moe_apply_probs_on_input,
        f"{_FUSED_EXPERTS}=1 in env_vars": is_named or not model.gated_linear_unit or installed_release() == "0.18",
    }
    if missing := [name for name, is_there in needs.items() if not is_there]:
        raise ConfigError(
            f"model.use_transformer_engine_op_fuser = True with experts needs {', '.join(missing)};"
            " provide it, or set it to False"
        )


_FUSED_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"  # a part of Apex, for Megatron-Core's own attention
_FUSED_EXPERTS = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
# They need Transformer Engine, Apex or CUDA extensions, or go through torch.compile.
_FUSIONS = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "persist_layer_norm",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
)


def adapt_to_device(config: ConfigContainer, *, has_gpu: bool | None = None) -> dict[str, Any]:
    """Change settings that the device does not support; return "section.field" -> new value. May be called again."""
    gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    made: dict[str, Any] = {}

    def change(section: str, name: str, value: Any) -> None:
        target = getattr(config, section)
        if hasattr(target, name) and getattr(target, name) != value:
            setattr(target, name, value)
            made[f"{section}.{name}"] = str(value) if isinstance(value, torch.dtype) else value

    if not gpu:
        change("dist", "distributed_backend", "gloo")
        change("model", "use_cpu_initialization", True)
        # gloo reads a send buffer after isend has returned, so freeing it early would corrupt the message
        change("model", "deallocate_pipeline_outputs", False)
        change("ddp", "average_in_collective", False)  # gloo has no average
        if config.ddp.use_megatron_fsdp or config.dist.use_megatron_fsdp:
            change("ddp", "gradient_reduce_div_fusion", False)  # nor a sum of scaled values
        if getattr(config.model, "moe_token_dispatcher_type", None) == "flex":
            change("model", "moe_token_dispatcher_type", "alltoall")
        change("model", "pipeline_model_parallel_comm_backend", None)
    if not has_transformer_engine():
        change("model", "transformer_impl", "local")
        for name in _FUSIONS:
            change("model", name, False)
        change("optimizer", "use_precision_aware_optimizer", False)
        for name in OPTIMIZER_DTYPES:
            change("optimizer", name, torch.float32)
        for section in ("model", "comm_overlap", "ddp"):
            if getattr(getattr(config, section), "delay_wgrad_compute", None):
                change(section, "delay_wgrad_compute", False)
        change("model", "layernorm_zero_centered_gamma", False)  # torch's norms multiply by their weight itself
    if getattr(config.model, "attention_backend", None) == AttnBackend.local and find_spec(_FUSED_SOFTMAX) is None:
        change("model", "masked_softmax_fusion", False)
    if config.dist.use_torch_fsdp2:
        change("model", "gradient_accumulation_fusion", False)  # without a buffer to accumulate in
    _derive(config)
    if config.comm_overlap is None:
        # With virtual stages Megatron-LM demands overlapped P2P: without it, two stages silently train wrongly
        is_interleaved = getattr(config.model, "virtual_pipeline_model_parallel_size", None) is not None
        change("model", "overlap_p2p_comm", is_interleaved)
        change("model", "batch_p2p_comm", not is_interleaved)
    return made


def _derive(config: ConfigContainer) -> None:
    """Fill in values that follow from other sections and are the same on every device."""
    model: Any = config.model
    if config.mixed_precision is None and getattr(model, "pipeline_dtype", None) is None:
        model.pipeline_dtype = model.params_dtype
    _pad_uneven_dispatch(model)
    model.log_max_attention_logit |= config.logger.log_max_attention_logit
    config.optimizer.log_num_zeros_in_grad |= config.logger.log_num_zeros_in_grad
    config.optimizer.barrier_with_L1_time = config.logger.barrier_with_L1_time
    tokenizer = config.tokenizer
    if tokenizer.use_tokenizer_vocab_size:
        model.vocab_size = None
    is_null = tokenizer.tokenizer_type in (None, "NullTokenizer") and tokenizer.metadata_path is None
    if getattr(model, "vocab_size", None) is None and is_null and tokenizer.vocab_size is not None:
        take_vocabulary(model, tokenizer.vocab_size)


def _pad_uneven_dispatch(model: Any) -> None:
    """Let ranks pass HybridEP different numbers of tokens if no graphs fix their shapes, as Megatron-Bridge does."""
    dispatcher = getattr(model, "moe_token_dispatcher_type", None), getattr(model, "moe_flex_dispatcher_backend", None)
    old_names = (getattr(model, name, False) for name in ("enable_cuda_graph", "external_cuda_graph"))
    if dispatcher == ("flex", "hybridep") and not cuda_graphs.implementation(model) and not any(old_names):
        for name in ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens"):
            if hasattr(model, name):
                setattr(model, name, True)


def take_vocabulary(model: Any, vocab_size: int) -> None:
    """Give the model the tokenizer's vocabulary, padded according to `make_vocab_size_divisible_by`."""
    model.vocab_size, model.should_pad_vocab = vocab_size, True


def refuse_unsupported(config: ConfigContainer) -> None:
    """Refuse settings that the loop would ignore: a ConfigError names each field, its value and the harmless value."""

    def get(section: str, name: str, default: Any) -> Any:
        return getattr(getattr(config, section), name, default)  # a section that is None has no field

    others = (_asked_otherwise(config), asked_of_sharding(config), asked_of_adapters(config))
    if asked := [*asked_for(get), *(each for found in others for each in found)]:
        raise ConfigError(f"the training loop does not do this: {'; '.join(asked)}")
    if missing := [*needed(get, _lacking()), *_of_a_missing_engine(config.model)]:
        raise ConfigError(f"this machine cannot train that: {'; '.join(missing)}")


def _of_a_missing_engine(model: Any) -> Iterator[str]:
    graphs = cuda_graphs.implementation(model)
    if graphs == "transformer_engine" and torch.cuda.is_available() and not has_transformer_engine():
        yield "model.cuda_graph_impl = 'transformer_engine' needs Transformer Engine (use 'local')"
    if isinstance(model, HybridModelProvider) and model.pattern is None and not has_transformer_engine():
        yield f"model = {type(model).__name__} without hybrid_layer_pattern: Mamba layers need {TRANSFORMER_ENGINE}"


def _lacking() -> set[str]:
    has = {GPU: torch.cuda.is_available(), TRANSFORMER_ENGINE: has_transformer_engine()}
    return {what for what, is_there in has.items() if not is_there}


def _asked_otherwise(config: ConfigContainer) -> Iterator[str]:
    model: Any = config.model
    if isinstance(model, HybridModelProvider):
        if (stages := model.virtual_pipeline_model_parallel_size) is not None:  # nor does Megatron-Bridge build them
            yield f"model.virtual_pipeline_model_parallel_size = {stages} of a hybrid model (use None)"
    elif not isinstance(model, GPTModelProvider):
        yield f"model = {type(model).__name__} (use GPTModelProvider, MLAModelProvider or HybridModelProvider)"
    elif has_transformer_engine() and model.transformer_layer_spec is local_layer_spec:
        yield "model.transformer_layer_spec = local_layer_spec (Transformer Engine is installed, and used)"
    if has_transformer_engine() and getattr(model, "transformer_impl", None) == "local":
        yield "model.transformer_impl = 'local' (Transformer Engine is installed, and used)"
    tp, ep = model.tensor_model_parallel_size, model.expert_model_parallel_size
    if model.num_moe_experts and ep == 1 and (etp := model.expert_tensor_parallel_size or tp) != tp:
        # Megatron-Core reduces the experts' gradients over the groups of the dense layers then
        field = "model.expert_tensor_parallel_size"
        yield f"{field} = {etp} with expert_model_parallel_size = 1 and tensor_model_parallel_size = {tp} (use {tp})"
    fuser = "use_transformer_engine_op_fuser"
    if model.num_moe_experts and getattr(model, fuser, False) and not _knows(fuser):
        yield f"model.{fuser} = True with experts (use False: it needs Megatron-Core 0.18)"
    if getattr(model, "dense_grouped_gemm", False) and not _knows("use_grouped_gemm_for_dense_mlp"):
        yield "model.dense_grouped_gemm = True (use False: it needs Megatron-Core 0.18)"
    yield from _of_modelopt(config)
    if getattr(model, engine_layers.FIELD, False) and has_transformer_engine():
        yield from engine_layers.unlike(model)
    if getattr(model, "qk_clip", False):
        yield from _clips_wrongly(config)
    yield from asked_of_documents(config)


def _of_modelopt(config: ConfigContainer) -> Iterator[str]:
    """Yield parts that ModelOpt does not restore, and attention to later tokens, which no mask hides."""
    model: Any = config.model
    if getattr(model, "restore_modelopt_state", False):
        combined = (
            ("model.virtual_pipeline_model_parallel_size", model.virtual_pipeline_model_parallel_size, None),
            ("checkpoint.non_persistent_ckpt_type", config.checkpoint.non_persistent_ckpt_type, None),
            ("ddp.use_megatron_fsdp", config.ddp.use_megatron_fsdp, False),
        )
        for field, value, harmless in combined:
            if value != harmless:
                yield f"{field} = {value!r} with model.restore_modelopt_state = True (use {harmless!r})"
    if has_transformer_engine() and getattr(model, "transformer_layer_spec", None) is modelopt_transformer_layer_spec:
        given = model.use_arbitrary_attention_mask
        has_mask = getattr(config.dataset, "skip_getting_attention_mask_from_dataset", True) is False
        if not has_mask and (model.context_parallel_size == 1 if given is None else given):
            mask = "dataset.skip_getting_attention_mask_from_dataset = False"
            yield f"model.use_arbitrary_attention_mask = {given!r} without a mask (use False, or {mask})"


def _knows(field: str) -> bool:
    """Return whether the installed Megatron-Core reads a field of the model."""
    return any(each.name == field for each in fields(TransformerConfig))


def _clips_wrongly(config: ConfigContainer) -> Iterator[str]:
    """Yield configurations in which Megatron-Core's `clip_qk` assumes wrong shapes of the weights."""
    model: Any = config.model
    if (tp := model.tensor_model_parallel_size) > 1 and not model.multi_latent_attention:
        yield f"model.qk_clip = True with tensor_model_parallel_size = {tp} (use 1, or multi-latent attention)"
    if config.optimizer.use_distributed_optimizer and (model.bf16 or model.fp16):
        yield "model.qk_clip = True in 16 bits with optimizer.use_distributed_optimizer = True (use False)"
