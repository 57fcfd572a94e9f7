"""Statistics over the measured steps of a run, and plausibility checks."""

from cloudai_mbridge.metrics.statistics import (
    Definitions,
    Metrics,
    Statistic,
    capped,
    capped_mean,
    capped_mean_of_rates,
    implausible,
    measure,
    missing_steps,
    over_runs,
    summarize,
)

__all__ = [
    "Definitions",
    "Metrics",
    "Statistic",
    "capped",
    "capped_mean",
    "capped_mean_of_rates",
    "implausible",
    "measure",
    "missing_steps",
    "over_runs",
    "summarize",
]
