"""Submit runs, watch them to their end, and keep a journal."""

from cloudai_mbridge.runner.context import Judge, Observer
from cloudai_mbridge.runner.interrupt import Pace
from cloudai_mbridge.runner.journal import Journal
from cloudai_mbridge.runner.watch import run_all
from cloudai_mbridge.verdict import Judgement

__all__ = ["Journal", "Judge", "Judgement", "Observer", "Pace", "run_all"]
