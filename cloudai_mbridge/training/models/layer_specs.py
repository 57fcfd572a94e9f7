"""Modules of a transformer layer: Transformer Engine's if installed, else local modules on torch; and of hybrid models.

Without Transformer Engine, hybrids have attention, MLP and MoE: Mamba and linear attention have kernels for a GPU only.
"""

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variant_specs
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from cloudai_mbridge.training.compat.models import HybridStack, HybridStackSubmodules
from cloudai_mbridge.training.models import engine_layers
from cloudai_mbridge.training.models.attention import SDPACoreAttention, TorchNorm

_HAS_PREDICTION = "mtp_block_spec" in {each.name for each in fields(HybridStackSubmodules)}  # since 0.17


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and a GPU usable: its layers do not run on a CPU."""
    return bool(gpt_layer_specs.HAVE_TE) and torch.cuda.is_available()


def default_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers of one pipeline stage; dense and MoE layers follow `config.moe_layer_freq`.

    Linear attention follows `config.linear_attention_freq`.
    """
    if config.experimental_attention_variant is not None:
        return variant_specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    if not has_transformer_engine():
        return local_layer_spec(config, vp_stage)
    if config.use_transformer_engine_full_layer_spec:
        return engine_layers.block_spec(config, vp_stage)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if config.attention_backend == AttnBackend.local:
        # Megatron-Core switches off all attention of Transformer Engine then
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    if config.use_transformer_engine_op_fuser and config.num_moe_experts is None:
        # Experts read the field themselves; dense layers next to them have no fused form in upstream's models either
        arguments: dict[str, Any] = {"use_te_op_fuser": True}
        make_spec = gpt_layer_specs.get_mlp_module_spec
        # Megatron-Bridge's name and Megatron-Core's, since 0.18
        if config.dense_grouped_gemm or getattr(config, "use_grouped_gemm_for_dense_mlp", False):
            make_spec = partial(gpt_layer_specs.get_mlp_module_spec_for_backend, gpt_layer_specs.TESpecProvider())
            arguments["use_grouped_gemm_for_dense_mlp"] = True
        for layer in block.layer_specs:
            layer.submodules.mlp = make_spec(**arguments)
    return block


def local_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the same layers without Transformer Engine, on torch's own functions."""
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        put_on_torch(layer)
    block.layer_norm = TorchNorm
    return block


def modelopt_transformer_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers that NVIDIA's ModelOpt converts one product at a time: norms are modules of their own.

    Attention takes any mask, for speculative decoding, unless the field is False or sequences are split (cp > 1).
    """
    if not has_transformer_engine():
        return local_layer_spec(config, vp_stage)
    from megatron.core.post_training.modelopt.gpt.model_specs import get_gpt_modelopt_spec

    takes_any = config.use_arbitrary_attention_mask
    return get_gpt_modelopt_spec(
        config,
        remap_te_layernorm=True,
        use_arbitrary_attention_mask=config.context_parallel_size == 1 if takes_any is None else takes_any,
    )


def put_on_torch(layer: Any) -> None:
    """Replace a local layer's norms and its core attention."""
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if "Norm" in getattr(getattr(attention, name, None), "__name__", ""):
            setattr(attention, name, TorchNorm)


def mtp_block_spec(config: Any, layer_spec: Any, vp_stage: int | None) -> Any:
    """Return the multi-token-prediction layers, None without any."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    has_te = has_transformer_engine()
    if not getattr(layer_spec, "layer_specs", True):  # a stage of prediction alone: as the decoder's last layer
        if config.experimental_attention_variant is not None:
            layers = variant_specs.get_transformer_layer_with_experimental_attention_variant_spec(config)
        else:
            layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
                config, use_transformer_engine=has_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
            )
            if not has_te:
                put_on_torch(layers[-1])
        layer_spec = layers[-1]
    block = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=has_te, vp_stage=vp_stage)
    for layer in () if block is None or has_te else block.layer_specs:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = TorchNorm
    return block


class LocalHybridStack(HybridStack):  # type: ignore[misc]
    """Megatron-Core's stack with torch's final norm instead of Transformer Engine's."""

    def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **keywords: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **keywords)
        if self.post_process and post_layer_norm:
            self.final_norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.post_layer_norm = True


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
        parts = {"enorm": TorchNorm, "hnorm": TorchNorm, "eh_proj": ColumnParallelLinear, "layer_norm": TorchNorm}
        layer = ModuleSpec(module=MultiTokenPredictionLayer, submodules=MultiTokenPredictionLayerSubmodules(**parts))
        experts["mtp_block_spec"] = ModuleSpec(
            module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
        )
    return ModuleSpec(
        module=LocalHybridStack, submodules=HybridStackSubmodules(attention_layer=attention, mlp_layer=mlp, **experts)
    )


def _layer(config: Any, experts: int | None, module: Any) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    layer.module = module or layer.module
    put_on_torch(layer)
    return layer
