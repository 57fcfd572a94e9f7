"""What a gate says: on a terminal, as Markdown for a CI's step summary, and as JUnit XML."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.gate.compare.verdict import GREEN, GateResult, GateVerdict, MetricVerdict, PointVerdict
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.report.formats.junit import set_counts, xml_text
from cloudai_mbridge.report.formats.markdown_text import inline
from cloudai_mbridge.report.formats.text import visible

_STYLES = {
    GateVerdict.PASS: "green",
    GateVerdict.IMPROVEMENT: "bold green",
    GateVerdict.REGRESSION: "bold red",
    GateVerdict.INCONCLUSIVE: "yellow",
    GateVerdict.NOT_COMPARABLE: "yellow",
    GateVerdict.NOT_RUN: "red",
}
_SIGNS = {GateVerdict.PASS: "✅", GateVerdict.IMPROVEMENT: "🚀", GateVerdict.REGRESSION: "❌"}
_DOUBT = "⚠️"
_COLUMNS = ("point", "metric", "verdict", "reference", "result", "change", "why")
_MOST_ROWS = 2000  # of about 400 bytes each: GitHub refuses more than 1 MiB
_WHOLE = "(the point)"


def render_gate(result: GateResult) -> RenderableType:
    """Render a row per point and metric, what concerns whole points below, and the verdict last."""
    table = Table(title=Text(f"gate {result.policy} against {printable(result.reference)}"), title_justify="left")
    table.add_column("point", overflow="fold")
    table.add_column("metric")
    table.add_column("verdict")
    for name in ("reference", "result", "change", "would be seen"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for point in result.rows:
        name = printable(point.point)
        for metric in point.metrics:
            old, new, change = _numbers(metric)
            verdict = Text(f"{metric.verdict} (waived)", style="yellow") if metric.waived else _styled(metric.verdict)
            detectable = "" if metric.detectable is None else f"{metric.detectable:.1%}"
            table.add_row(
                *(Text(name), Text(metric.metric), verdict),
                *map(Text, (old, new, change, detectable, printable(_why(metric)))),
            )
        for text in point.words:
            table.add_row(Text(name), "", _styled(point.verdict), "", "", "", "", Text(printable(text)))
    changes = [Text(printable(f"changed: {name}: {old} → {new}")) for name, (old, new) in _changes(result)]
    notes = [Text(f"note: {printable(note)}") for note in result.notes]
    return Group(table, *changes, *notes, Text(_conclusion(result), style=_STYLES[result.verdict]))


def _styled(verdict: GateVerdict) -> Text:
    return Text(str(verdict), style=_STYLES[verdict])


def _numbers(metric: MetricVerdict) -> tuple[str, str, str]:
    """Return reference, result and change, "" for what is not known."""
    old, new = (
        "" if value is None else f"{value:.4g} {metric.unit}".rstrip() for value in (metric.baseline, metric.value)
    )
    return old, new, "" if metric.change is None else f"{metric.change:+.2%}"


def _why(metric: MetricVerdict) -> str:
    return f"{metric.words}; {metric.waived}" if metric.waived else metric.words


def _changes(result: GateResult) -> Iterator[tuple[str, tuple[str, str]]]:
    return ((str(name), (str(old), str(new))) for name, (old, new) in result.environment_changes.items())


def _conclusion(result: GateResult) -> str:
    """Say the verdict, the counts behind it and the error rate in one line."""
    counts = {verdict: sum(point.verdict is verdict for point in result.points) for verdict in GateVerdict}
    points = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no points"
    return f"{str(result.verdict).upper()}: {points}; false-alarm rate at most {result.false_alarm_rate:.1%}"


def render_gate_markdown(result: GateResult) -> str:
    """Render the conclusion, a row per point and metric with the worst first, and what changed around them."""
    worst_first = sorted(result.rows, key=lambda point: point.verdict in GREEN)
    rows = [row for point in worst_first for row in _markdown_rows(point)]
    remarks = [f"{len(rows) - _MOST_ROWS} more rows are left out"] if len(rows) > _MOST_ROWS else []
    remarks += [f"changed: {inline(name)}: {inline(old)} → {inline(new)}" for name, (old, new) in _changes(result)]
    lines = [
        f"# {_sign(result.verdict)} Gate {inline(result.policy)}: {result.verdict}",
        "",
        inline(f"{_conclusion(result)}; compared with {result.reference}"),
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---|---|---:|---:|---:|---|",
        *(f"| {' | '.join(row)} |" for row in rows[:_MOST_ROWS]),
        "",
        *(f"- {text}" for text in (*remarks, *map(inline, result.notes))),
    ]
    return "\n".join(lines) + "\n"


def _sign(verdict: GateVerdict) -> str:
    return _SIGNS.get(verdict, _DOUBT)


def _markdown_rows(point: PointVerdict) -> Iterator[tuple[str, ...]]:
    name = inline(point.point)
    for text in point.words:
        yield (name, "", f"{_sign(point.verdict)} {point.verdict}", "", "", "", inline(text))
    for metric in point.metrics:
        verdict = f"{_sign(metric.verdict)} {metric.verdict}{' (waived)' if metric.waived else ''}"
        old, new, change = _numbers(metric)
        yield (name, inline(metric.metric), verdict, inline(old), inline(new), change, inline(_why(metric)))


def render_gate_junit(result: GateResult) -> str:
    """Render a suite per point and a case per metric. Metrics that do not decide are skipped, and so are waived ones.

    Whatever else is not green is a failure.
    """
    root = ET.Element("testsuites", name=visible(f"gate {result.policy}"))
    root.extend(map(_suite, result.rows))
    if not result.points:
        suite = ET.SubElement(root, "testsuite", name="gate")
        case = ET.SubElement(suite, "testcase", name="(any point)", classname="gate")
        ET.SubElement(case, "error", message="there is no point to judge", type=str(result.verdict))
        set_counts(suite)
    set_counts(root)
    return xml_text(root)


def _suite(point: PointVerdict) -> ET.Element:
    """Return the cases of the point itself, which fails whenever the point is not green, and of its metrics."""
    suite = ET.Element("testsuite", name=visible(point.point))
    case = ET.SubElement(suite, "testcase", name=_WHOLE, classname=visible(point.point))
    if point.verdict not in GREEN:
        text = "; ".join(point.words) or f"see its metrics: {point.verdict}"
        ET.SubElement(case, "failure", message=visible(text), type=str(point.verdict))
    for metric in point.metrics:
        _add_metric(ET.SubElement(suite, "testcase", name=metric.metric, classname=visible(point.point)), metric)
    set_counts(suite)
    return suite


def _add_metric(case: ET.Element, metric: MetricVerdict) -> None:
    if metric.waived:
        ET.SubElement(case, "skipped", message=visible(metric.waived))
    elif metric.verdict in GREEN:
        ET.SubElement(case, "system-out").text = visible(metric.words)
    elif metric.decides:
        ET.SubElement(case, "failure", message=visible(metric.words), type=str(metric.verdict))
    else:
        ET.SubElement(case, "skipped", message=visible(f"{metric.verdict}: {metric.words}"))
