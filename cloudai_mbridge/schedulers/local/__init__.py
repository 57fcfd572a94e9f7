"""Jobs on this machine, behind the same interface as Slurm's."""

from cloudai_mbridge.schedulers.local.client import LocalClient

__all__ = ["LocalClient"]
