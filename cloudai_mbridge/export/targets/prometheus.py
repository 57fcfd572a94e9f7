"""Prometheus: the text format, as node_exporter's textfile collector reads it."""

from cloudai_mbridge.export import load
from cloudai_mbridge.export.gauges import GAUGES, SUCCESS, names_of_labels, samples
from cloudai_mbridge.export.table import RunTable

_UNITS = {"s": "_seconds", "By": "_bytes"}
_RUN_LABELS = ("scenario", "system", "run")


def render(table: RunTable) -> bytes:
    """Return the gauges of a run's points, and of the run: its name, report time, and number of runs by verdict."""
    client = load("prometheus_client", "prometheus-client")
    registry = client.CollectorRegistry()
    names = names_of_labels(table)
    made = {
        each: client.Gauge(f"mbridge_{each.name}{_UNITS.get(each.unit, '')}", each.text, names, registry=registry)
        for each in (SUCCESS, *GAUGES)
    }
    for gauge, labels, value in samples(table):
        made[gauge].labels(**labels).set(value)
    run = {"scenario": table.scenario, "system": table.system, "run": table.run}
    reported = client.Gauge(
        "mbridge_reported_timestamp_seconds", "When the run was reported.", _RUN_LABELS, registry=registry
    )
    reported.labels(**run).set(table.reported_at.timestamp())
    text: bytes = client.generate_latest(registry)
    return text
