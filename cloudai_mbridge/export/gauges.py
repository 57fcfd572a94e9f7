"""Metrics of runs as gauges, shared by Prometheus and OpenTelemetry.

Names and labels are the same from one run of a scenario to the next, so that each point is one series.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cloudai_mbridge.export.table import RunTable
from cloudai_mbridge.metrics import MEASURES, PRIMARY, Measure
from cloudai_mbridge.report.columns import ARGUMENTS
from cloudai_mbridge.verdict import Verdict

_LABELS = ("scenario", "system", "test", "point", "iteration", "recipe", "world_size", *ARGUMENTS)


@dataclass(frozen=True)
class Gauge:
    """A metric. factor: from the column's unit to the base unit, in which it is sent."""

    name: str
    column: str
    unit: str
    text: str
    factor: float = 1.0


_GPU_TIME = Gauge("gpu_time", "gpu_hours", "s", "Time of the jobs x GPUs, failed attempts included.", 3600.0)
_BASE_UNITS = {"s": ("s", 1.0), "GiB": ("By", 2.0**30)}  # unit of a measure -> base unit, factor


def _gauges(measure: Measure) -> Iterator[Gauge]:
    """Yield the gauge of a measure, and the spread of the primary one."""
    name, columns = measure.stem.replace("_per_s_", "_per_second_"), measure.columns
    unit, factor = _BASE_UNITS.get(measure.unit, ("", 1.0))
    about = f"Capped mean {measure.about}" if measure.is_statistic else measure.about
    yield Gauge(name, measure.column, unit, f"{about[:1].upper()}{about[1:]}.", factor)
    if measure.name == PRIMARY:
        spread = f"Standard deviation of the {measure.label}, capped."
        yield Gauge(f"{name}_stddev", columns["capped_std"], unit, spread, factor)
        yield Gauge(f"{name}_mean", columns["mean"], unit, f"Plain mean {measure.about}.", factor)


GAUGES = (*(gauge for measure in MEASURES for gauge in _gauges(measure)), _GPU_TIME)
SUCCESS = Gauge("success", "verdict", "", "1 if the run succeeded, else 0.")


def names_of_labels(table: RunTable) -> tuple[str, ...]:
    """Return the labels that have a value in any row."""
    return tuple(name for name in _LABELS if any(row[name] is not None for row in table.ran))


def samples(table: RunTable) -> Iterator[tuple[Gauge, Mapping[str, str], float]]:
    """Yield the known numbers in base units, and whether each run succeeded. An unknown label is empty.

    A run that did not succeed has only its cost: a query for the fastest run must not find it.
    """
    names = names_of_labels(table)
    for row in table.ran:
        labels = {name: "" if row[name] is None else str(row[name]) for name in names}
        is_good = row["verdict"] == Verdict.SUCCESS
        yield SUCCESS, labels, float(is_good)
        for gauge in GAUGES if is_good else (_GPU_TIME,):
            if row[gauge.column] is not None:
                yield gauge, labels, row[gauge.column] * gauge.factor
