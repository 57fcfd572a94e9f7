"""Overlap of communication with computation: the config, user buffers for tensor parallelism, and tuned presets."""

from cloudai_mbridge.training.comm_overlap.config import CommOverlapConfig
from cloudai_mbridge.training.comm_overlap.presets import *  # noqa: F403
from cloudai_mbridge.training.comm_overlap.presets import __all__ as _PRESETS
from cloudai_mbridge.training.comm_overlap.user_buffers import (
    BulkOverlapCfg,
    PipelineOverlapCfg,
    RingExchangeOverlapCfg,
    TPOverlapCfg,
    TransformerLayerTPOverlapCfg,
)

__all__ = [
    "BulkOverlapCfg",
    "CommOverlapConfig",
    "PipelineOverlapCfg",
    "RingExchangeOverlapCfg",
    "TPOverlapCfg",
    "TransformerLayerTPOverlapCfg",
]
__all__ += _PRESETS
