"""Statistics over the measured steps of a run."""

from cloudai_mbridge.metrics.statistics import Definitions, Metrics, Statistic, measure

__all__ = ["Definitions", "Metrics", "Statistic", "measure"]
