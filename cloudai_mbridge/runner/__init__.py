"""Submit runs, watch them to their end, and write down what happened."""

from cloudai_mbridge.runner.journal import Journal
from cloudai_mbridge.runner.watch import Observer, run_all

__all__ = ["Journal", "Observer", "run_all"]
