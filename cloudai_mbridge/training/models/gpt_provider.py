"""GPT models: dense, grouped-query, MoE, multi-latent attention, multi-token prediction, sliding window.

Fields, types and defaults match Megatron-Bridge's `GPTModelProvider`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.models.layer_specs import (
    default_layer_spec,
    local_layer_spec,
    modelopt_transformer_layer_spec,
    mtp_block_spec,
)
from cloudai_mbridge.training.models.provider import (
    Deferred,
    ModelProvider,
    build_fused,
    can_enable_gradient_accumulation_fusion,
    model_arguments,
)
from cloudai_mbridge.training.models.quantization import RecipeConfig


@dataclass
class GPTModelProvider(Deferred, TransformerConfig, ModelProvider[GPTModel]):  # type: ignore[misc]
    """A GPT model. Sizes are the whole model's, `seq_length` the training sequence's."""

    share_embeddings_and_output_weights: bool = True
    position_embedding_type: Literal["learned_absolute", "rope", "yarn"] = "learned_absolute"
    rotary_base: int = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 1.0
    rotary_scaling_factor: float | None = None
    yarn_rotary_scaling_factor: float | None = None
    yarn_original_max_position_embeddings: int | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool | None = None
    seq_length: int = 1024
    attention_softmax_in_fp32: bool = False
    scatter_embedding_sequence_parallel: bool = True
    tp_only_amax_red: bool = False
    tp_comm_overlap_cfg: str | dict[str, Any] | None = None
    use_transformer_engine_full_layer_spec: bool = False
    use_transformer_engine_op_fuser: bool = False
    dense_grouped_gemm: bool = False
    transformer_layer_spec: ModuleSpec | Callable[["GPTModelProvider"], ModuleSpec] = default_layer_spec
    hf_model_id: str | None = None
    hf_model_revision: str | None = None
    num_moe_experts: int | None = None
    moe_grouped_gemm: bool = False
    qk_layernorm: bool = False
    fp8: str | None = None
    normalization: str = "LayerNorm"
    mtp_enabled: bool = False
    init_model_with_meta_device: bool = False
    use_te_rng_tracker: bool = False
    virtual_pipeline_model_parallel_size: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    masked_softmax_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    gradient_accumulation_fusion: bool = field(default_factory=can_enable_gradient_accumulation_fusion)
    restore_modelopt_state: bool = False
    use_arbitrary_attention_mask: bool | None = None
    quant_recipe: RecipeConfig | None = None

    def __post_init__(self) -> None:
        if self._is_finalizing:
            cuda_graphs.use_new_names(self)
            super().__post_init__()
            if self.position_embedding_type != "yarn" and self.yarn_rotary_scaling_factor is None:
                # Megatron-Core takes the mere presence of the field for yarn; 1 is the factor that changes nothing
                self.yarn_rotary_scaling_factor = 1.0

    def finalize(self) -> None:
        """Check the architecture and compute Megatron-Core's derived values. May be called again.

        Raises ValueError, AssertionError: Megatron-Core refuses the combination.
        """
        if self.quant_recipe is not None:
            self.quant_recipe.finalize()
        if self.num_attention_heads and self.num_query_groups is not None:
            groups = self.num_query_groups
            assert groups > 0, f"num_query_groups ({groups}) is not positive"
            assert self.num_attention_heads % groups == 0, (
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_query_groups ({groups})"
            )
        self.run_post_init()

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> GPTModel:
        """Build this stage's GPTModel, on the default device."""
        spec = self.transformer_layer_spec
        if spec in (default_layer_spec, local_layer_spec, modelopt_transformer_layer_spec):
            layer_spec = spec(self, vp_stage)
        else:
            layer_spec = spec(self) if callable(spec) else spec
        return build_fused(
            self,
            lambda: GPTModel(
                **model_arguments(self, pre_process, post_process, vp_stage),
                transformer_layer_spec=layer_spec,
                rope_scaling=self.rope_scaling,
                rope_scaling_factor=self.rope_scaling_factor,
                scatter_embedding_sequence_parallel=self.scatter_embedding_sequence_parallel,
                mtp_block_spec=mtp_block_spec(self, layer_spec, vp_stage),
                vp_stage=vp_stage,
            ),
        )


@dataclass
class MLAModelProvider(MLATransformerConfig, GPTModelProvider):  # type: ignore[misc]
    """A GPT model with multi-latent attention, as DeepSeek's."""

    quant_recipe: RecipeConfig | None = None

    def __post_init__(self) -> None:
        if self._is_finalizing:
            super().__post_init__()
