"""Slurm: its states, its text output, its commands."""

from cloudai_mbridge.slurm.client import SlurmClient

__all__ = ["SlurmClient"]
