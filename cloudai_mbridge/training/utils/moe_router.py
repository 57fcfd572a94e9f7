"""Freeze the routers of a mixture of experts."""

from typing import Any

from cloudai_mbridge.training.utils.model_hooks import ModelList, _ensure_model_list


def freeze_moe_router(model: Any) -> ModelList:
    """Stop training the router and the gate of the shared experts in every layer; return the chunks.

    Give it the chunks as they are built, before they are wrapped. Layers without a router are passed over. It may be
    called again.
    """
    chunks = _ensure_model_list(model)
    for chunk in chunks:
        for layer in getattr(getattr(chunk, "decoder", None), "layers", None) or ():
            mlp = getattr(layer, "mlp", None)
            for owner, names in (("router", ("weight", "bias")), ("shared_experts", ("gate_weight", "gate_bias"))):
                for name in names:
                    _freeze_parameter_if_present(getattr(mlp, owner, None), name)
    return chunks


def _freeze_parameter_if_present(module: object, name: str) -> None:
    """Stop training the parameter of this name; None and a missing one are passed over."""
    if (parameter := getattr(module, name, None)) is not None:
        parameter.requires_grad = False
