"""Training FLOPs of language models by the reference's formulas (docs/models.md).

Standard library only. Training costs three forward passes, a multiply-add two FLOPs: 6 per weight and token. Not
counted are norms, softmax, activations, routers, embedding look-ups and recomputed activations: these are model FLOPs.
"""

from cloudai_mbridge.training.flops.layers import count_layers, moe_layer_pattern
from cloudai_mbridge.training.flops.lora import PackedSamples, lora_flops_per_sample
from cloudai_mbridge.training.flops.quantities import FLOPS_FORMULA, NEW, OLD, Cost, Formula, Lengths, padded_vocab_size
from cloudai_mbridge.training.flops.total import cost_per_token, flops_per_token, num_floating_point_operations
from cloudai_mbridge.training.flops.vision import VisionPatches

__all__ = [
    "FLOPS_FORMULA",
    "NEW",
    "OLD",
    "Cost",
    "Formula",
    "Lengths",
    "PackedSamples",
    "VisionPatches",
    "cost_per_token",
    "count_layers",
    "flops_per_token",
    "lora_flops_per_sample",
    "moe_layer_pattern",
    "num_floating_point_operations",
    "padded_vocab_size",
]
