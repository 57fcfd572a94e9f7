"""Submit runs, watch them to their end, and write down what happened."""

from cloudai_mbridge.runner.journal.journal import Journal
from cloudai_mbridge.runner.tracked import Judge, Judgement, Observer
from cloudai_mbridge.runner.watch import Pace, run_all

__all__ = ["Journal", "Judge", "Judgement", "Observer", "Pace", "run_all"]
