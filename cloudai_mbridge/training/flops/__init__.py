"""Training FLOPs of language models by the reference's formulas (docs/models.md).

Standard library only. Training costs three forward passes, a multiply-add two FLOPs: 6 per weight and token. Not
counted are norms, softmax, activations, routers, embedding look-ups and recomputed activations: these are model FLOPs.
"""

from typing import Any

from cloudai_mbridge.training.flops.quantities import (
    FLOPS_FORMULA,
    NEW,
    OLD,
    Cost,
    Formula,
    Lengths,
    count_layers,
    moe_layer_pattern,
    padded_vocab_size,
)
from cloudai_mbridge.training.flops.total import (
    cost_per_token,
    flops_per_token,
    lora_flops_per_sample,
    num_floating_point_operations,
)

__all__ = [
    "FLOPS_FORMULA",
    "NEW",
    "OLD",
    "Cost",
    "Formula",
    "Lengths",
    "cost_per_token",
    "count_layers",
    "flops_per_token",
    "lora_flops_per_sample",
    "moe_layer_pattern",
    "num_floating_point_operations",
    "padded_vocab_size",
]

_SUCCESSORS = {
    "PackedSamples": "pass its two averages to `lora_flops_per_sample(model, tokens, squared)`",
    "VisionPatches": "pass `num_vision_patches` to `num_floating_point_operations`",
}


def __getattr__(name: str) -> Any:
    if name in _SUCCESSORS:
        raise ImportError(f"{__name__}.{name} was removed: {_SUCCESSORS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
