"""Statistics over the measured steps of a run."""

from cloudai_mbridge.metrics.statistics import Metrics, Statistic, measure

__all__ = ["Metrics", "Statistic", "measure"]
