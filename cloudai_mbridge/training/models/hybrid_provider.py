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
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine, local_stack_spec
from cloudai_mbridge.training.models.provider import (
    Deferred,
    ModelProvider,
    build_fused,
    can_enable_gradient_accumulation_fusion,
    model_arguments,
)
from cloudai_mbridge.training.models.quantization import RecipeConfig

LAYERS = "M*-EGD+"
_STAGE, _PREDICTION = "|", "/"
_CHUNK_SIZE = 128  # of Megatron-Core's Mamba layers


@dataclass
class HybridModelProvider(Deferred, TransformerConfig, ModelProvider[Any]):  # type: ignore[misc]
    """A hybrid of Mamba, attention, MLP and MoE layers."""

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
    rotary_base: int = 10000
    apply_rope_fusion: bool = True
    gated_linear_unit: bool = False
    normalization: str = "RMSNorm"
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    attention_backend: AttnBackend = AttnBackend.flash
    bias_dropout_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    gradient_accumulation_fusion: bool = field(default_factory=can_enable_gradient_accumulation_fusion)
    hybrid_stack_spec: ModuleSpec | Callable[..., ModuleSpec] | None = None
    hf_model_id: str | None = None
    hf_model_revision: str | None = None
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

    def finalize(self) -> None:
        """Check the layer pattern, and run Megatron-Core's own checks.

        Raises ValueError: the number of layers is neither given nor follows from the pattern, or differs from it; the
        pattern contains unknown layers, or another number of predictions than `mtp_num_layers`.
        """
        if self.hybrid_layer_pattern and self.hybrid_override_pattern not in (None, self.hybrid_layer_pattern):
            raise ValueError("model.hybrid_override_pattern and hybrid_layer_pattern are both set; use the latter")
        pattern, block = self.pattern, self.mtp_hybrid_override_pattern
        is_repeated = getattr(self, "mtp_use_repeated_layer", False)  # one block, present even without predictions
        if pattern and block:
            depths = max(int(is_repeated), self.mtp_num_layers or 0)
            pattern = _PREDICTION.join([pattern.split(_PREDICTION)[0], *([block] * depths)])
        if pattern:
            self._take_pattern(pattern, is_repeated)
        if self.num_layers is None:
            raise ValueError("neither model.num_layers nor hybrid_layer_pattern is set; set one of them")
        if self.quant_recipe is not None:
            self.quant_recipe.finalize()
        if self.mamba_chunk_size < 1:
            raise ValueError(f"model.mamba_chunk_size = {self.mamba_chunk_size}: use at least 1")
        self.run_post_init()

    def _take_pattern(self, pattern: str, is_repeated: bool) -> None:
        """Check the pattern, and set what follows from it."""
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
        if prediction and self.mtp_num_layers != len(prediction) and not is_repeated:
            raise ValueError(
                f"model.mtp_num_layers = {self.mtp_num_layers}, but the layer pattern has {len(prediction)} predictions"
            )
        if not has_unified_patterns() and (prediction or _STAGE in decoder):
            raise ValueError(f"model.hybrid_layer_pattern = {pattern!r}: '|' and '/' need Megatron-Core 0.17 or newer")
        self.hybrid_layer_pattern, self.hybrid_override_pattern = pattern, None

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> Any:
        """Build this stage's model, on the default device."""
        given: Any = self.hybrid_stack_spec
        if given is None and has_transformer_engine():
            given = te_stack_spec(for_modelopt=self.restore_modelopt_state)
        elif given is None:
            given = local_stack_spec(self)
        spec: ModuleSpec = given(self) if callable(given) and not isinstance(given, ModuleSpec) else given
        if self.mamba_chunk_size != _CHUNK_SIZE:
            spec = copy.deepcopy(spec)
            mixer = spec.submodules.mamba_layer.submodules.mixer
            mixer.params = {**mixer.params, "chunk_size": self.mamba_chunk_size}
        has_ratios = self.hybrid_attention_ratio or self.hybrid_mlp_ratio
        return build_fused(
            self,
            lambda: build_hybrid(
                spec,
                self.pattern or (None if has_ratios else "M" * self.num_layers),
                vp_stage,
                **model_arguments(self, pre_process, post_process, vp_stage),
                hybrid_attention_ratio=self.hybrid_attention_ratio,
                hybrid_mlp_ratio=self.hybrid_mlp_ratio,
            ),
        )


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
