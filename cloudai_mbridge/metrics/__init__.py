"""Statistics over the measured steps of a run, and plausibility checks."""

from cloudai_mbridge.metrics.measures import (
    MEASURES,
    PRIMARY,
    TABLE_MEASURES,
    Definitions,
    Direction,
    Measure,
    Metrics,
    Over,
    measure,
)
from cloudai_mbridge.metrics.statistics import (
    Statistic,
    capped,
    capped_mean,
    capped_mean_of_rates,
    implausible,
    missing_steps,
    over_runs,
    summarize,
)

__all__ = [
    "MEASURES",
    "PRIMARY",
    "TABLE_MEASURES",
    "Definitions",
    "Direction",
    "Measure",
    "Metrics",
    "Over",
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
