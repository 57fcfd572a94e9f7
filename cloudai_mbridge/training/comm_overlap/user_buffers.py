"""How each linear layer overlaps its products with tensor-parallel communication in Transformer Engine's user buffers.

A slot's name is layer and pass: `fc1_dgrad` is the input gradient of the first MLP matrix.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TPOverlapCfg:
    """Overlap of one linear layer in one pass; see the three kinds below."""


@dataclass
class PipelineOverlapCfg(TPOverlapCfg):
    """Split the product into `num_splits` chunks and send each while the next is computed.

    num_sm: streaming multiprocessors (SMs) that communicate; cga_size: thread blocks per cluster of theirs;
    set_sm_margin: leave these SMs out of the product's grid; fp8_buf: communicate in FP8.
    """

    num_sm: int
    cga_size: int
    num_splits: int
    set_sm_margin: bool
    fp8_buf: bool = False
    atomic_gemm: bool = False
    method: str = "pipeline"


@dataclass
class RingExchangeOverlapCfg(TPOverlapCfg):
    """Pass chunks around the ring of ranks while the chunk at hand is multiplied.

    aggregate: take the chunks in pairs. Other fields as in `PipelineOverlapCfg`.
    """

    aggregate: bool = False
    method: str = "ring_exchange"
    num_sm: int = 1
    cga_size: int = 1
    set_sm_margin: bool = False
    fp8_buf: bool = False
    atomic_gemm: bool = False


@dataclass
class BulkOverlapCfg(TPOverlapCfg):
    """Overlap a whole collective with a product that does not depend on it. Fields as in `PipelineOverlapCfg`."""

    num_sm: int
    cga_size: int
    set_sm_margin: bool
    method: str = "bulk"


@dataclass
class TransformerLayerTPOverlapCfg:
    """Overlap of the four matrices of a transformer layer. None leaves a slot to Transformer Engine."""

    qkv_dgrad: TPOverlapCfg | None
    qkv_wgrad: TPOverlapCfg | None
    fc1_dgrad: TPOverlapCfg | None
    fc1_wgrad: TPOverlapCfg | None
    qkv_fprop: TPOverlapCfg | None
    proj_dgrad: TPOverlapCfg | None
    fc1_fprop: TPOverlapCfg | None
    fc2_dgrad: TPOverlapCfg | None
    proj_fprop: TPOverlapCfg | None
    fc2_fprop: TPOverlapCfg | None


def as_te_dict(layer: TransformerLayerTPOverlapCfg) -> dict[str, dict[str, Any]]:
    """Return slot -> settings. Slots that are None are absent: for Transformer Engine a key is a choice."""
    return {slot: settings for slot, settings in asdict(layer).items() if settings is not None}
