"""Fit a configuration to the device that it runs on, and say what was changed.

The same configuration trains on GPUs with Transformer Engine and, unchanged, on a laptop's CPU. What the device cannot
do is replaced before anything is validated, and told in the run's first record; nothing is replaced silently.
"""

from typing import Any

import torch

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine

# They need Transformer Engine, Apex or CUDA extensions, or go through torch.compile.
_FUSIONS = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "persist_layer_norm",
)


def adapt_to_device(config: ConfigContainer, *, has_gpu: bool | None = None) -> dict[str, Any]:
    """Change what the device cannot do; return "section.field" -> new value. May be called again."""
    gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    changes = _Changes(config)
    model: Any = config.model
    if not gpu:
        changes.set("dist", "distributed_backend", "gloo")
        changes.set("model", "use_cpu_initialization", True)
        # gloo reads a send buffer after isend has returned, so freeing it early would corrupt what is sent
        changes.set("model", "deallocate_pipeline_outputs", False)
    if not has_transformer_engine():
        changes.set("model", "transformer_impl", "local")
        for name in _FUSIONS:
            changes.set("model", name, False)
        changes.set("model", "layernorm_zero_centered_gamma", False)  # torch's norms multiply by their weight itself
    _derive(config)
    if config.comm_overlap is None:
        # With virtual stages Megatron-LM demands overlapped P2P: without it, two stages train wrongly and say nothing
        is_interleaved = getattr(model, "virtual_pipeline_model_parallel_size", None) is not None
        changes.set("model", "overlap_p2p_comm", is_interleaved)
        changes.set("model", "batch_p2p_comm", not is_interleaved)
    return changes.made


def _derive(config: ConfigContainer) -> None:
    """Fill in what follows from other sections and is the same on every device."""
    model: Any = config.model
    if config.mixed_precision is None and getattr(model, "pipeline_dtype", None) is None:
        model.pipeline_dtype = model.params_dtype
    config.optimizer.overlap_param_gather = config.ddp.overlap_param_gather
    config.optimizer.log_num_zeros_in_grad |= config.logger.log_num_zeros_in_grad
    config.optimizer.barrier_with_L1_time = config.logger.barrier_with_L1_time
    tokenizer = config.tokenizer
    is_null = tokenizer.tokenizer_type in (None, "NullTokenizer") and tokenizer.metadata_path is None
    if getattr(model, "vocab_size", None) is None and is_null and tokenizer.vocab_size is not None:
        take_vocabulary(model, tokenizer.vocab_size + 1)  # the end of a document


def take_vocabulary(model: Any, vocab_size: int) -> None:
    """Give the model the tokenizer's vocabulary, padded as `make_vocab_size_divisible_by` says."""
    model.vocab_size, model.should_pad_vocab = vocab_size, True


class _Changes:
    """The fields that were set to something else than they held."""

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self.made: dict[str, Any] = {}

    def set(self, section: str, name: str, value: Any) -> None:
        target = getattr(self._config, section)
        if hasattr(target, name) and getattr(target, name) != value:
            setattr(target, name, value)
            self.made[f"{section}.{name}"] = value
