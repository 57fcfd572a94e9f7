"""Preparation of a configuration for this process: adaptation to the device, refusals, derived values, validation."""

from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.config.rules.validate import runtime_config_update
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.mixed_precision import MixedPrecisionConfig
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.models.provider import has_apex_extension
from cloudai_mbridge.training.schema.known_names import OPTIMIZER_DTYPES
from cloudai_mbridge.training.startup.unsupported import check_resolved, check_values, refuse_unsupported

_CHANGED = "_changed_by_prepare"


def prepare(config: ConfigContainer) -> dict[str, Any]:
    """Prepare in place; return the changes for the device, "section.field" -> new value.

    May be called again: changes of an earlier call that still hold are returned as well.

    ConfigError: a rule is broken, or the loop does not support a configured feature.
    """
    check_values(config)
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
    check_resolved(config)
    if had_sequence_parallel and not config.model.sequence_parallel:
        adapted["model.sequence_parallel"] = False
    earlier = {}
    for path, value in vars(config).get(_CHANGED, {}).items():
        section, _, name = path.partition(".")
        if str(getattr(getattr(config, section), name, None)) == str(value):
            earlier[path] = value
    after = _plain_values(config) if config.mixed_precision is not None else {}
    overwritten = {path: str(value) for path, value in after.items() if value != before.get(path)}
    changed = earlier | adapted | overwritten
    setattr(config, _CHANGED, changed)
    return changed


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


_FUSED_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"  # a part of Apex, for Megatron-Core's own attention
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
    if not (config.model.gradient_accumulation_fusion and has_apex_extension()):
        for section in ("model", "comm_overlap"):
            if getattr(getattr(config, section), "defer_embedding_wgrad_compute", None):
                change(section, "defer_embedding_wgrad_compute", False)  # its product is the fused one alone
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
    dispatcher = getattr(model, "moe_token_dispatcher_type", None), getattr(model, "moe_flex_dispatcher_backend", None)
    old_names = (getattr(model, name, False) for name in ("enable_cuda_graph", "external_cuda_graph"))
    if dispatcher == ("flex", "hybridep") and not cuda_graphs.implementation(model) and not any(old_names):
        # Ranks pass different numbers of tokens if no graphs fix their shapes, as in Megatron-Bridge
        for name in ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens"):
            if hasattr(model, name):
                setattr(model, name, True)
    model.log_max_attention_logit |= config.logger.log_max_attention_logit
    config.optimizer.log_num_zeros_in_grad |= config.logger.log_num_zeros_in_grad
    config.optimizer.barrier_with_L1_time = config.logger.barrier_with_L1_time
    tokenizer = config.tokenizer
    if tokenizer.use_tokenizer_vocab_size:
        model.vocab_size = None
    is_null = tokenizer.tokenizer_type in (None, "NullTokenizer") and tokenizer.metadata_path is None
    if getattr(model, "vocab_size", None) is None and is_null and tokenizer.vocab_size is not None:
        take_vocabulary(model, tokenizer.vocab_size)


def take_vocabulary(model: Any, vocab_size: int) -> None:
    """Give the model the tokenizer's vocabulary, padded according to `make_vocab_size_divisible_by`."""
    model.vocab_size, model.should_pad_vocab = vocab_size, True
