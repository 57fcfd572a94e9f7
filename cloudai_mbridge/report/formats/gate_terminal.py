"""What a gate says, on a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.gate.compare.verdict import GateResult, GateVerdict, MetricVerdict
from cloudai_mbridge.logs.tail import printable

STYLES = {
    GateVerdict.PASS: "green",
    GateVerdict.IMPROVEMENT: "bold green",
    GateVerdict.REGRESSION: "bold red",
    GateVerdict.INCONCLUSIVE: "yellow",
    GateVerdict.NOT_COMPARABLE: "yellow",
    GateVerdict.NOT_RUN: "red",
}


def render_gate(result: GateResult) -> RenderableType:
    """Render a row per point and metric, what concerns whole points below, and the verdict last."""
    table = Table(title=Text(f"gate {result.policy} against {printable(result.reference)}"), title_justify="left")
    table.add_column("point", overflow="fold")
    table.add_column("metric")
    table.add_column("verdict")
    for name in ("reference", "result", "change", "would be seen"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for point in result.points:
        name = printable(point.point)
        for metric in point.metrics:
            table.add_row(Text(name), *_cells(metric))
        for text in point.words:
            table.add_row(Text(name), "", _verdict(point.verdict), "", "", "", "", Text(printable(text)))
    changes = [
        Text(f"changed: {printable(str(name))}: {printable(str(old))} → {printable(str(new))}")
        for name, (old, new) in result.environment_changes.items()
    ]
    notes = [Text(f"note: {printable(note)}") for note in result.notes]
    return Group(table, *changes, *notes, Text(conclude(result), style=STYLES[result.verdict]))


def _cells(metric: MetricVerdict) -> list[Text]:
    why = f"{metric.words}; {metric.waived}" if metric.waived else metric.words
    return [
        Text(metric.metric),
        Text(f"{metric.verdict} (waived)", style="yellow") if metric.waived else _verdict(metric.verdict),
        Text(value_text(metric.baseline, metric.unit)),
        Text(value_text(metric.value, metric.unit)),
        Text("" if metric.change is None else f"{metric.change:+.2%}"),
        Text("" if metric.detectable is None else f"{metric.detectable:.1%}"),
        Text(printable(why)),
    ]


def _verdict(verdict: GateVerdict) -> Text:
    return Text(str(verdict), style=STYLES[verdict])


def value_text(value: float | None, unit: str) -> str:
    """Return a value with its unit, "" for none."""
    return "" if value is None else f"{value:.4g} {unit}".rstrip()


def conclude(result: GateResult) -> str:
    """Say the verdict, the counts behind it and the error rate in one line."""
    counts = {verdict: sum(point.verdict is verdict for point in result.points) for verdict in GateVerdict}
    points = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no points"
    return (
        f"{str(result.verdict).upper()}: {points};"
        f" no change at all is called a regression in at most {result.false_alarm_rate:.1%} of gates"
    )
