"""Merge adapters into the weights that they adapt: a plain model again."""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from cloudai_mbridge.training.peft.base_layer import weights
from cloudai_mbridge.training.peft.linear import AdaptedLinear


@torch.no_grad()
def merge(chunk: Any) -> None:
    """Replace adapted layers by layers with merged weights, in a chunk or its wrapper. A collective."""
    for name, module in list(chunk.named_modules()):
        if isinstance(module, AdaptedLinear):
            for weight, merged in zip(weights(module.to_wrap), module.merged(), strict=True):
                weight.copy_(merged.to(weight.dtype))
            if hasattr(module.to_wrap, "return_layernorm_output"):
                module.to_wrap.return_layernorm_output = False
            parent, _, attribute = name.rpartition(".")
            setattr(chunk.get_submodule(parent), attribute, module.to_wrap)
        elif isinstance(module, TopKRouter) and hasattr(module, "adapter"):
            (product,) = module.adapter.products()
            module.weight.copy_((module.weight.float() + product.float()).to(module.weight.dtype))
            del module.adapter, module.gating
