"""Which modules a transformer layer is made of: Transformer Engine's where installed, else local ones on torch."""

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs

from cloudai_mbridge.training.models.attention import SDPACoreAttention, TorchNorm


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and a GPU usable: its layers do not run on a CPU."""
    return bool(gpt_layer_specs.HAVE_TE) and torch.cuda.is_available()


def default_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers of one pipeline stage; dense and MoE layers follow `config.moe_layer_freq`."""
    if not has_transformer_engine():
        return local_layer_spec(config, vp_stage)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if config.use_transformer_engine_op_fuser and config.num_moe_experts is None:
        # Experts look at the field themselves; dense layers beside them have no fused form in upstream's models either
        for layer in block.layer_specs:
            layer.submodules.mlp = gpt_layer_specs.get_mlp_module_spec(use_te_op_fuser=True)
    return block


def local_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the same layers without Transformer Engine, on torch's own functions."""
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = SDPACoreAttention
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if "Norm" in getattr(getattr(attention, name, None), "__name__", ""):
                setattr(attention, name, TorchNorm)
    block.layer_norm = TorchNorm
    return block


def mtp_block_spec(config: Any, layer_spec: Any, vp_stage: int | None) -> Any:
    """Return the multi-token-prediction layers, None without any."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config, layer_spec, use_transformer_engine=has_transformer_engine(), vp_stage=vp_stage
    )
