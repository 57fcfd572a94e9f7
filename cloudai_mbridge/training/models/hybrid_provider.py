"""Hybrid models: a pattern of Mamba (M), attention (*), MLP (-), MoE (E) and other layers.

Fields, types and defaults match Megatron-Bridge's `HybridModelProvider`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from cloudai_mbridge.training.compat.models import build_hybrid, has_unified_patterns, te_stack_spec
from cloudai_mbridge.training.models.hybrid_layers import local_stack_spec
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.models.provider import Deferred, ModelProvider, model_arguments
from cloudai_mbridge.training.models.quantization import RecipeConfig
from cloudai_mbridge.training.models.weight_gradients import (
    can_enable_gradient_accumulation_fusion,
    fuse_weight_gradients,
    unfused_without_apex,
)

LAYERS = "M*-EGD+"
_STAGE, _PREDICTION = "|", "/"
_CHUNK_SIZE = 128  # of Megatron-Core's Mamba layers


@dataclass
class HybridModelProvider(Deferred, TransformerConfig, ModelProvider[Any]):  # type: ignore[misc]
    """A hybrid of Mamba, attention, MLP and MoE layers."""

    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = False
    params_dtype: torch.dtype = torch.bfloat16
    fp16: bool = False
    bf16: bool = True
    num_layers: int = None  # type: ignore[assignment]
    is_hybrid_model: bool = True
    mamba_num_groups: int = 8
    mamba_chunk_size: int = _CHUNK_SIZE
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
    hybrid_stack_spec: ModuleSpec | Callable[..., ModuleSpec] | None = None
    vocab_size: int | None = None
    should_pad_vocab: bool = False
    hf_model_id: str | None = None
    _pg_collection: Any = None
    mtp_num_layers: int | None = 0
    mtp_hybrid_override_pattern: str | None = None
    keep_mtp_spec_in_bf16: bool = False
    restore_modelopt_state: bool = False
    quant_recipe: RecipeConfig | None = None

    def __post_init__(self) -> None:
        if self._is_finalizing:
            without_missing_fusions(self)
            super().__post_init__()

    @property
    def pattern(self) -> str | None:
        """The layers, with `|` between pipeline stages, then `/` and the layers of each predicted token."""
        return self.hybrid_layer_pattern or self.hybrid_override_pattern

    @property
    def _has_ratios(self) -> bool:
        return bool(self.hybrid_attention_ratio or self.hybrid_mlp_ratio)

    def finalize(self) -> None:
        """Check the layer pattern, and run Megatron-Core's own checks.

        Raises ValueError: the number of layers is neither given nor follows from the pattern, or differs from it; the
        pattern contains unknown layers, or another number of predictions than `mtp_num_layers`.
        """
        if self.hybrid_layer_pattern and self.hybrid_override_pattern not in (None, self.hybrid_layer_pattern):
            raise ValueError("model.hybrid_override_pattern and hybrid_layer_pattern are both set; use the latter")
        pattern = self._with_prediction()
        if pattern:
            self._check_pattern(pattern)
            self.hybrid_layer_pattern, self.hybrid_override_pattern = pattern, None
        if self.num_layers is None:
            raise ValueError("neither model.num_layers nor hybrid_layer_pattern is set; set one of them")
        if self.quant_recipe is not None:
            self.quant_recipe.finalize()
        if self.mamba_chunk_size < 1:
            raise ValueError(f"model.mamba_chunk_size = {self.mamba_chunk_size}: use at least 1")
        self.run_post_init()

    def _with_prediction(self) -> str | None:
        pattern, block = self.pattern, self.mtp_hybrid_override_pattern
        if not pattern or not block:
            return pattern
        depths = self.mtp_num_layers or 0
        if getattr(self, "mtp_use_repeated_layer", False):  # one block, present even without predictions
            depths = max(1, depths)
        return _PREDICTION.join([pattern.split(_PREDICTION)[0], *([block] * depths)])

    def _check_pattern(self, pattern: str) -> None:
        decoder, *prediction = pattern.split(_PREDICTION)
        symbols = set(decoder.replace(_STAGE, "") + "".join(prediction))
        if unknown := sorted(symbols - set(LAYERS)):
            raise ValueError(f"model.hybrid_layer_pattern: {unknown} are not layers; use {', '.join(LAYERS)}")
        count = len(decoder.replace(_STAGE, ""))
        if self.num_layers not in (None, count):
            raise ValueError(f"model.num_layers = {self.num_layers}, but the layer pattern has {count} layers")
        self.num_layers = count
        if prediction and not self.mtp_num_layers:
            self.mtp_num_layers = len(prediction)
        is_repeated = getattr(self, "mtp_use_repeated_layer", False)
        if prediction and self.mtp_num_layers != len(prediction) and not is_repeated:
            raise ValueError(
                f"model.mtp_num_layers = {self.mtp_num_layers}, but the layer pattern has {len(prediction)} predictions"
            )
        if not has_unified_patterns() and (prediction or _STAGE in decoder):
            raise ValueError(f"model.hybrid_layer_pattern = {pattern!r}: '|' and '/' need Megatron-Core 0.17 or newer")

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> Any:
        """Build this stage's model, on the default device."""
        with unfused_without_apex(self):
            model = build_hybrid(
                self._stack_spec(),
                self.pattern or (None if self._has_ratios else "M" * self.num_layers),
                vp_stage,
                **model_arguments(self, pre_process, post_process, vp_stage),
                hybrid_attention_ratio=self.hybrid_attention_ratio,
                hybrid_mlp_ratio=self.hybrid_mlp_ratio,
            )
        if self.gradient_accumulation_fusion:
            fuse_weight_gradients(model)
        return model

    def _stack_spec(self) -> ModuleSpec:
        given = self.hybrid_stack_spec
        if given is None:
            given = local_stack_spec(self)
            if has_transformer_engine():
                given = te_stack_spec(for_modelopt=self.restore_modelopt_state)
        spec: ModuleSpec = given(self) if callable(given) and not isinstance(given, ModuleSpec) else given
        if self.mamba_chunk_size != _CHUNK_SIZE:
            spec = copy.deepcopy(spec)
            mixer = spec.submodules.mamba_layer.submodules.mixer
            mixer.params = {**mixer.params, "chunk_size": self.mamba_chunk_size}
        return spec


@dataclass
class MambaModelProvider(HybridModelProvider):
    """The same under its name before Megatron-Bridge 0.5."""

    mamba_stack_spec: ModuleSpec | Callable[..., ModuleSpec] | None = None

    def finalize(self) -> None:
        """Take the layers under their old name, and check as the base class does."""
        if self.mamba_stack_spec is not None:
            self.hybrid_stack_spec, self.mamba_stack_spec = self.mamba_stack_spec, None
        super().finalize()


def without_missing_fusions(config: TransformerConfig) -> None:
    """Turn off a default that Megatron-Core refuses without Transformer Engine."""
    if not has_transformer_engine():
        config.apply_rope_fusion = False
