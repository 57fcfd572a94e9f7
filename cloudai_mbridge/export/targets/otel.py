"""OpenTelemetry: gauges to a collector, by OTLP over HTTP. Variables of the target: OTEL_EXPORTER_OTLP_ENDPOINT, ..."""

from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.export import errors_of, load
from cloudai_mbridge.export.gauges import GAUGES, SUCCESS, samples
from cloudai_mbridge.export.table import RunTable
from cloudai_mbridge.version import __version__

_PACKAGE = "opentelemetry-exporter-otlp-proto-http"


def send(table: RunTable) -> str:
    """Send the gauges once, and return their number as text. ToolFailure: no collector accepts them."""
    exporter = load("opentelemetry.exporter.otlp.proto.http.metric_exporter", _PACKAGE)
    result = load("opentelemetry.sdk.metrics.export", _PACKAGE).MetricExportResult
    with errors_of("otel, to OTEL_EXPORTER_OTLP_ENDPOINT or localhost:4318", "opentelemetry"):
        data, number = _collected(table)
        sender = exporter.OTLPMetricExporter()
        try:
            if sender.export(data) is not result.SUCCESS:
                raise RuntimeError  # the log contains the reason
        finally:
            sender.shutdown()
    return f"otel: {counted(number, 'sample')} sent"


def _collected(table: RunTable) -> tuple[Any, int]:
    """Return the gauges in the exporter's form, and the number of samples. Their time is the time of the export."""
    metrics, export = load("opentelemetry.sdk.metrics", _PACKAGE), load("opentelemetry.sdk.metrics.export", _PACKAGE)
    resource = load("opentelemetry.sdk.resources", _PACKAGE).Resource
    reader = export.InMemoryMetricReader()
    about = {"service.name": "mbridge", "service.version": __version__, "mbridge.run": table.run}
    provider = metrics.MeterProvider(metric_readers=[reader], resource=resource.create(about), shutdown_on_exit=False)
    meter = provider.get_meter("mbridge", __version__)
    made = {each: meter.create_gauge(f"mbridge.{each.name}", each.unit, each.text) for each in (SUCCESS, *GAUGES)}
    found = list(samples(table))
    for gauge, labels, value in found:
        made[gauge].set(value, {name: text for name, text in labels.items() if text})
    data = reader.get_metrics_data()
    provider.shutdown()
    return data, len(found)
