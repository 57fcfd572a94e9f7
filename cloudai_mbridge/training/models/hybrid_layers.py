"""The layers of hybrid models without Transformer Engine: attention, MLP and MoE on torch's own functions.

Mamba and linear attention have kernels for a GPU only, and Megatron-Core no other path.
"""

from dataclasses import fields
from functools import cache
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from cloudai_mbridge.training.compat.models import HybridStack, HybridStackSubmodules
from cloudai_mbridge.training.models.attention import TorchNorm
from cloudai_mbridge.training.models.layer_specs import put_on_torch

_HAS_PREDICTION = "mtp_block_spec" in {each.name for each in fields(HybridStackSubmodules)}  # since 0.17


@cache
def _stack() -> type:
    class LocalStack(HybridStack):  # type: ignore[misc]
        """Megatron-Core's stack with torch's final norm instead of Transformer Engine's."""

        def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **keywords: Any) -> None:
            super().__init__(config, *args, post_layer_norm=False, **keywords)
            if self.post_process and post_layer_norm:
                self.final_norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
                self.post_layer_norm = True

    return LocalStack


def local_stack_spec(config: Any) -> ModuleSpec:
    """Return the layers of `*`, `-` and `E`."""
    experts = {} if config.num_moe_experts is None else {"moe_layer": _layer(config, config.num_moe_experts, None)}
    attention, mlp = _layer(config, None, None), _layer(config, None, MLPLayer)
    for name in ("pre_mlp_layernorm", "mlp"):
        setattr(attention.submodules, name, IdentityOp)
    attention.submodules.mlp_bda = IdentityFuncOp
    for layer in (mlp, *experts.values()):
        layer.submodules.input_layernorm = layer.submodules.self_attention = IdentityOp
        layer.submodules.self_attn_bda = IdentityFuncOp
    if _HAS_PREDICTION:
        experts["mtp_block_spec"] = _prediction()
    return ModuleSpec(
        module=_stack(), submodules=HybridStackSubmodules(attention_layer=attention, mlp_layer=mlp, **experts)
    )


def _layer(config: Any, experts: int | None, module: Any) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer.module = module or layer.module
    put_on_torch(layer)
    return layer


def _prediction() -> ModuleSpec:
    parts = {"enorm": TorchNorm, "hnorm": TorchNorm, "eh_proj": ColumnParallelLinear, "layer_norm": TorchNorm}
    layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=MultiTokenPredictionLayerSubmodules(**parts))
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    )
