"""What recomputing activations costs: a forward pass again, which is a third of a module's training FLOPs."""

from typing import NamedTuple

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import Granularity, ParallelLayout

_FORWARD = 1 / 3


class RecomputeFactors(NamedTuple):
    """Work with recomputation over work without."""

    attention: float = 1
    core: float = 1
    mlp: float = 1
    moe: float = 1
    other: float = 1


_NOTHING = RecomputeFactors()


def recomputed(model: Architecture, layout: ParallelLayout) -> RecomputeFactors:
    """Return the factors of a layout.

    Of modules that are part of a group of work (the up-projections of latent attention, an activation, a norm) the part
    is rough: half of the projections, a quarter of the element-wise passes.
    """
    recompute = layout.recompute
    if recompute.granularity is Granularity.NONE:
        return _NOTHING
    if recompute.granularity is Granularity.FULL:
        whole = 1 + _FORWARD * _share_of_layers(model, layout)
        return RecomputeFactors(whole, whole, whole, whole, whole)
    modules = recompute.modules
    return RecomputeFactors(
        attention=1 + _FORWARD / 2 * ("mla_up_proj" in modules),
        core=1 + _FORWARD * ("core_attn" in modules),
        mlp=1 + _FORWARD * ("mlp" in modules or "shared_experts" in modules),
        moe=1 + _FORWARD * ("moe" in modules),
        other=1 + _FORWARD / 4 * (("layernorm" in modules) + ("moe_act" in modules)),
    )


def _share_of_layers(model: Architecture, layout: ParallelLayout) -> float:
    """Return the share of a rank's layers: all of them, or the first of every chunk."""
    if layout.recompute.method == "uniform":
        return 1.0
    chunks = layout.pp * layout.vp
    return min(1.0, layout.recompute.num_layers * chunks / model.num_layers)
