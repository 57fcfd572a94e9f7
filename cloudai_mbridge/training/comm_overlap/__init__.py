"""Overlap of communication with computation: the config, user buffers for tensor parallelism, and tuned presets."""

from cloudai_mbridge.training.comm_overlap import user_buffers
from cloudai_mbridge.training.comm_overlap.config import CommOverlapConfig
from cloudai_mbridge.training.comm_overlap.user_buffers import *  # noqa: F403

__all__ = ["CommOverlapConfig"]
__all__ += user_buffers.__all__
