"""Models that are validated here, and not built: Mamba hybrids, T5, multimodal. Fields are Megatron-Bridge's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.models.provider import Deferred, ModelProvider
from cloudai_mbridge.training.models.weight_gradients import can_enable_gradient_accumulation_fusion


@dataclass
class MambaModelProvider(Deferred, TransformerConfig, ModelProvider[Any]):  # type: ignore[misc]
    """A hybrid of Mamba, attention and MLP layers."""

    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = False
    params_dtype: torch.dtype = torch.bfloat16
    fp16: bool = False
    bf16: bool = True
    num_layers: int = None  # type: ignore[assignment]
    mamba_num_groups: int = 8
    num_attention_heads: int = 1
    hybrid_attention_ratio: float = 0.0
    hybrid_mlp_ratio: float = 0.0
    hybrid_override_pattern: str | None = None
    hybrid_layer_pattern: str | None = None
    seq_length: int = 8192
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "none"
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    seq_len_interpolation_factor: float | None = None
    apply_rope_fusion: bool = True
    make_vocab_size_divisible_by: int = 128
    gated_linear_unit: bool = False
    normalization: str = "RMSNorm"
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    attention_backend: AttnBackend = AttnBackend.flash
    deallocate_pipeline_outputs: bool = True
    bias_dropout_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    gradient_accumulation_fusion: bool = field(default_factory=can_enable_gradient_accumulation_fusion)
    mamba_stack_spec: ModuleSpec | Callable[..., ModuleSpec] | None = None
    vocab_size: int | None = None
    should_pad_vocab: bool = False
    hf_model_id: str | None = None
    _pg_collection: Any = None
    mtp_num_layers: int = 0
    mtp_hybrid_override_pattern: str | None = None
    keep_mtp_spec_in_bf16: bool = False
    restore_modelopt_state: bool = False

    def __post_init__(self) -> None:
        if self._is_finalizing:
            _without_missing_fusions(self)
            super().__post_init__()

    def finalize(self) -> None:
        """Check the layer pattern and what Megatron-Core checks.

        Raises ValueError: the number of layers is neither given nor follows from the pattern, or differs from it.
        """
        pattern = self.hybrid_layer_pattern or self.hybrid_override_pattern
        if pattern and (unknown := set(pattern) - set("M*-E|/")):
            raise ValueError(f"model.hybrid_layer_pattern: {sorted(unknown)} are not layers; use M, *, - and E")
        count = sum(pattern.count(kind) for kind in "M*-E") if pattern else None
        if self.num_layers is None:
            if count is None:
                raise ValueError("model.num_layers is not set and no hybrid_layer_pattern tells it; set one of them")
            self.num_layers = count
        if count is not None and count != self.num_layers:
            raise ValueError(f"model.num_layers = {self.num_layers}, but the layer pattern has {count} layers")
        self.run_post_init()


@dataclass
class T5ModelProvider(Deferred, TransformerConfig, ModelProvider[Any]):  # type: ignore[misc]
    """An encoder and a decoder."""

    encoder_num_layers: int | None = None
    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    apply_rope_fusion: bool = True
    max_position_embeddings: int = 512
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    rotary_percent: float = 1.0
    seq_len_interpolation_factor: float | None = None
    seq_length: int = 512
    seq_length_dec: int = 128
    encoder_pipeline_model_parallel_size: int = 0
    attention_softmax_in_fp32: bool = False
    bias_activation_fusion: bool = True
    masked_softmax_fusion: bool = True
    persist_layer_norm: bool = True
    bias_dropout_fusion: bool = True
    deallocate_pipeline_outputs: bool = True
    num_moe_experts: int | None = None
    recompute_num_layers: int = 1
    distribute_saved_activations: bool = False
    enable_autocast: bool = False
    transformer_layer_spec: ModuleSpec | Callable[["T5ModelProvider"], ModuleSpec] | None = None
    vocab_size: int | None = None
    should_pad_vocab: bool = False
    tp_comm_overlap_cfg: str | dict[str, Any] | None = None
    _pg_collection: Any = None

    def __post_init__(self) -> None:
        if self._is_finalizing:
            _without_missing_fusions(self)
            super().__post_init__()

    def finalize(self) -> None:
        """Check the pipeline split of the encoder and what Megatron-Core checks."""
        if self.encoder_num_layers is None:
            self.encoder_num_layers = self.num_layers
        assert 0 <= self.encoder_pipeline_model_parallel_size <= self.pipeline_model_parallel_size, (
            f"encoder_pipeline_model_parallel_size ({self.encoder_pipeline_model_parallel_size}) does not fit into"
            f" pipeline_model_parallel_size ({self.pipeline_model_parallel_size})"
        )
        self.run_post_init()


def _without_missing_fusions(config: TransformerConfig) -> None:
    """Turn a default off that Megatron-Core refuses where Transformer Engine is not installed."""
    if not has_transformer_engine():
        config.apply_rope_fusion = False


@dataclass
class MIMOProvider(ModelProvider[Any]):
    """A language model with encoders of other modalities, each with a parallel layout of its own."""

    language_model: TransformerConfig | None = None
    modality_encoders: dict[str, Any] = field(default_factory=dict)
    special_token_ids: dict[str, int] = field(default_factory=dict)
    seq_length: int = 1024
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    deterministic_mode: bool = False

    def finalize(self) -> None:
        """Check that every modality has the token that stands for it."""
        if missing := sorted(set(self.modality_encoders) - set(self.special_token_ids)):
            raise ValueError(f"model.special_token_ids: no token for {', '.join(missing)}")
        if self.language_model is not None and hasattr(self.language_model, "finalize"):
            self.language_model.finalize()
