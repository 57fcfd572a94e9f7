"""Models of Mamba, attention and MLP layers: Megatron-Core has renamed and moved them."""

from importlib import import_module
from inspect import signature
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

try:  # since 0.18
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    _SPECS, _SPEC = "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"
except ImportError:
    from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

    _SPECS, _SPEC = "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"

__all__ = ["HybridModel", "HybridStack", "HybridStackSubmodules"]

_TAKES = signature(HybridModel).parameters


def has_unified_patterns() -> bool:
    """Return whether a pattern may hold stages and multi-token prediction: since 0.17."""
    return "hybrid_layer_pattern" in _TAKES


def te_stack_spec(*, for_modelopt: bool = False) -> ModuleSpec:
    """Return Megatron-Core's own layers, from Transformer Engine; or the layers that NVIDIA's ModelOpt converts."""
    if for_modelopt:
        kind = _SPEC.removesuffix("_stack_spec")
        module = import_module(f"megatron.core.post_training.modelopt.{kind}.model_specs")
        converted: ModuleSpec = getattr(module, f"get_{kind}_stack_modelopt_spec")(remap_te_layernorm=True)
        return converted
    spec: ModuleSpec = getattr(import_module(_SPECS), _SPEC)
    return spec


def build_hybrid(spec: ModuleSpec, pattern: str | None, vp_stage: int | None, **arguments: Any) -> Any:
    """Build a stage of the model. arguments: common to every release."""
    arguments[_SPEC] = spec
    if has_unified_patterns():
        return HybridModel(hybrid_layer_pattern=pattern, vp_stage=vp_stage, **arguments)
    return HybridModel(hybrid_override_pattern=pattern, **arguments)
