"""Slurm: its states, its text output, its commands."""

from cloudai_mbridge.schedulers.slurm.client import SlurmClient
from cloudai_mbridge.schedulers.slurm.limits import has_gpu_gres

__all__ = ["SlurmClient", "has_gpu_gres"]
