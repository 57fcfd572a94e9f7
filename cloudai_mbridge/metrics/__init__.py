"""Statistics over the measured steps of a run, and whether they can be true."""

from cloudai_mbridge.metrics.statistics import (
    Definitions,
    Metrics,
    Statistic,
    implausible,
    measure,
    missing_steps,
    summarize,
)

__all__ = ["Definitions", "Metrics", "Statistic", "implausible", "measure", "missing_steps", "summarize"]
