"""Models that are validated here, and not built: T5, multimodal. Fields are Megatron-Bridge's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.transformer import ModuleSpec, TransformerConfig

from cloudai_mbridge.training.models.hybrid_provider import without_missing_fusions
from cloudai_mbridge.training.models.provider import Deferred, ModelProvider


@dataclass
class T5ModelProvider(Deferred, TransformerConfig, ModelProvider[Any]):  # type: ignore[misc]
    """An encoder and a decoder."""

    encoder_num_layers: int | None = None
    share_embeddings_and_output_weights: bool = True
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    apply_rope_fusion: bool = True
    max_position_embeddings: int = 512
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    seq_length: int = 512
    seq_length_dec: int = 128
    encoder_pipeline_model_parallel_size: int = 0
    attention_softmax_in_fp32: bool = False
    bias_activation_fusion: bool = True
    masked_softmax_fusion: bool = True
    persist_layer_norm: bool = True
    bias_dropout_fusion: bool = True
    num_moe_experts: int | None = None
    recompute_num_layers: int = 1
    distribute_saved_activations: bool = False
    enable_autocast: bool = False
    transformer_layer_spec: ModuleSpec | Callable[["T5ModelProvider"], ModuleSpec] | None = None
    tp_comm_overlap_cfg: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self._is_finalizing:
            without_missing_fusions(self)
            super().__post_init__()

    def finalize(self) -> None:
        """Check the pipeline split of the encoder, and run Megatron-Core's own checks."""
        if self.encoder_num_layers is None:
            self.encoder_num_layers = self.num_layers
        assert 0 <= self.encoder_pipeline_model_parallel_size <= self.pipeline_model_parallel_size, (
            f"encoder_pipeline_model_parallel_size ({self.encoder_pipeline_model_parallel_size}) does not fit into"
            f" pipeline_model_parallel_size ({self.pipeline_model_parallel_size})"
        )
        self.run_post_init()


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
