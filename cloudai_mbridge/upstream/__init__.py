"""Runs of Megatron-Bridge's own launcher, behind the same interface as Slurm's and this machine's."""

from cloudai_mbridge.upstream.client import UpstreamClient
from cloudai_mbridge.upstream.route import ByLauncher

__all__ = ["ByLauncher", "UpstreamClient"]
