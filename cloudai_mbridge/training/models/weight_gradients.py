"""Gradient accumulation fusion: the product that computes a weight's gradient adds it to the accumulated one.

Transformer Engine's layers can do it, and so can Megatron-Core's own linear layers with an extension of Apex. A
Transformer Engine model has one such linear layer, the output layer, and cannot be built with the fusion without Apex.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from cloudai_mbridge.training.models.layer_specs import has_transformer_engine

_FIELD = "gradient_accumulation_fusion"
FUSES_WEIGHT_GRADIENT = "fuse_wgrad_accumulation"  # attribute of Transformer Engine's layers


def has_apex_extension() -> bool:
    """Return whether Megatron-Core's own linear layers can fuse."""
    return find_spec("fused_weight_gradient_mlp_cuda") is not None


def can_enable_gradient_accumulation_fusion() -> bool:
    """Return whether any layer of a model can fuse on this machine."""
    return has_transformer_engine() or has_apex_extension()


@contextmanager
def unfused_without_apex(config: Any) -> Iterator[None]:
    """Build a model inside with the fusion off if Apex is missing; afterwards the field is as it was."""
    fused = getattr(config, _FIELD)
    setattr(config, _FIELD, fused and has_apex_extension())
    try:
        yield
    finally:
        setattr(config, _FIELD, fused)


def fuse_weight_gradients(model: torch.nn.Module) -> None:
    """Switch the fusion on in Transformer Engine's layers."""
    for module in model.modules():
        if hasattr(module, FUSES_WEIGHT_GRADIENT):
            setattr(module, FUSES_WEIGHT_GRADIENT, True)
