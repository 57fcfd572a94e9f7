"""Result of a gate: on a terminal, as Markdown for a CI's step summary, and as JUnit XML."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.gate.compare.verdict import GREEN, GateResult, GateVerdict, MetricVerdict, PointVerdict
from cloudai_mbridge.gate.compare.words import percent
from cloudai_mbridge.gate.formats.gate_messages import (
    conclusion,
    decisive_metrics,
    findings,
    headline,
    sentence,
    verdict_text,
)
from cloudai_mbridge.gate.next_steps import NextSteps
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.report.junit import set_counts, xml_text
from cloudai_mbridge.report.markdown import fenced, inline

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
_MOST_LINES, _MOST_CHANGES, _MOST_OTHERS = 20, 8, 3
_WHOLE = "(the point)"


def render_gate(result: GateResult) -> list[tuple[str, str]]:
    """Return lines with their styles: the headline, the points that are not green, and other notable facts."""
    found = findings(result)
    lines = [(headline(result), _STYLES[result.verdict])]
    lines += [(text, _STYLES[verdict]) for text, verdict in _lines(found)]
    rest = len(found) - _MOST_LINES
    lines += [(f"  and {rest} more", "")] if rest > 0 else []
    lines += [(text, "") for text in _also(result)]
    lines += [(f"{conclusion(result)}; compared with {result.reference}", "dim")]
    return [(printable(text), style) for text, style in lines]


def _lines(found: Sequence[tuple[PointVerdict, str]]) -> Iterator[tuple[str, GateVerdict]]:
    """Yield a line per finding; for a single finding, whose sentence is the headline, its numbers."""
    for point, text in found[:_MOST_LINES]:
        metrics = [metric for metric in decisive_metrics(point) if not metric.words.startswith("follows")]
        also = f"; also {', '.join(metric.metric for metric in metrics[1:])}" if metrics[1:] else ""
        if len(found) > 1:
            yield f"  {text}{_bounds(metrics[0]) if metrics else ''}{also}", point.verdict
        elif metrics:
            yield f"  {metrics[0].metric}: {metrics[0].words}{also}", point.verdict


def _bounds(metric: MetricVerdict) -> str:
    if metric.interval is None or metric.verdict is not GateVerdict.REGRESSION:
        return ""
    runs = f", {counted(metric.num_runs, 'run')} against {metric.num_baseline_runs}" if metric.num_runs else ""
    return f" ({percent(metric.interval[0])} to {percent(metric.interval[1])}{runs})"


def _also(result: GateResult) -> Iterator[str]:
    """Yield a few lines: waived metrics, outlier runs in green points, changes, and notes."""
    yield from _few([f"waived: {p.point} {m.metric}: {m.waived}" for p in result.rows for m in p.metrics if m.waived])
    yield from _few([f"{p.point}: {text}" for p in result.rows if p.verdict in GREEN for text in p.words])
    changes = [f"{name} {old} -> {new}" for name, (old, new) in _changes(result)]
    if changes:
        more = len(changes) - _MOST_CHANGES
        yield f"changed: {'; '.join(changes[:_MOST_CHANGES])}{f'; and {more} more' if more > 0 else ''}"
    yield from _few([f"note: {note}" for note in result.notes])


def _few(texts: Sequence[str]) -> Iterator[str]:
    yield from texts[:_MOST_OTHERS]
    if len(texts) > _MOST_OTHERS:
        yield f"and {len(texts) - _MOST_OTHERS} more such lines (--verbose)"


def render_next_steps(steps: NextSteps | None) -> list[str]:
    """Return a line per step, and the lines of a waiver as they are."""
    found = steps.titled() if steps else ()
    texts = [f"{title}:\n{text}" if language == "toml" else f"{title}: {text}" for title, language, text in found]
    return [printable(line) for text in texts for line in text.rstrip("\n").split("\n")]


def render_gate_table(result: GateResult) -> RenderableType:
    """Render a row per point and metric, followed by all changes and all notes."""
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
            verdict = Text(verdict_text(point), style=_STYLES[point.verdict])
            table.add_row(Text(name), "", verdict, "", "", "", "", Text(printable(text)))
    changes = [Text(printable(f"changed: {name}: {old} → {new}")) for name, (old, new) in _changes(result)]
    notes = [Text(f"note: {printable(note)}") for note in result.notes]
    return Group(table, *changes, *notes)


def _styled(verdict: GateVerdict) -> Text:
    return Text(str(verdict), style=_STYLES[verdict])


def _numbers(metric: MetricVerdict) -> tuple[str, str, str]:
    """Return reference, result and change, "" if unknown."""
    old, new = (
        "" if value is None else f"{value:.4g} {metric.unit}".rstrip() for value in (metric.baseline, metric.value)
    )
    return old, new, "" if metric.change is None else f"{metric.change:+.2%}"


def _why(metric: MetricVerdict) -> str:
    return f"{metric.words}; {metric.waived}" if metric.waived else metric.words


def _changes(result: GateResult) -> Iterator[tuple[str, tuple[str, str]]]:
    return ((str(name), (str(old), str(new))) for name, (old, new) in result.environment_changes.items())


def render_gate_markdown(result: GateResult, steps: NextSteps | None = None) -> str:
    """Render the headline, a line per point that is not green, the conclusion, the next steps, and the details.

    The details are a row per point and metric with the worst first, and the changes in the environment.
    """
    worst_first = sorted(result.rows, key=lambda point: point.verdict in GREEN)
    rows = [row for point in worst_first for row in _markdown_rows(point)]
    remarks = [f"{len(rows) - _MOST_ROWS} more rows are left out"] if len(rows) > _MOST_ROWS else []
    remarks += [f"changed: {inline(name)}: {inline(old)} → {inline(new)}" for name, (old, new) in _changes(result)]
    found = findings(result)
    found = found if len(found) > 1 else []  # a single finding is the title
    more = [f"- and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    lines = [
        f"# {_sign(result.verdict)} {inline(headline(result))}",
        "",
        *(f"- {inline(text)}" for _, text in found[:_MOST_LINES]),
        *more,
        *([""] if found else []),
        inline(f"Gate {result.policy}: {conclusion(result)}; compared with {result.reference}"),
        "",
        *_markdown_steps(steps),
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---|---|---:|---:|---:|---|",
        *(f"| {' | '.join(row)} |" for row in rows[:_MOST_ROWS]),
        "",
        *(f"- {text}" for text in (*remarks, *map(inline, result.notes))),
    ]
    return "\n".join(lines) + "\n"


def _markdown_steps(steps: NextSteps | None) -> Iterator[str]:
    """Yield a line per step, with its command in a block."""
    for title, language, text in steps.titled() if steps else ():
        yield f"**{inline(title)}**{'' if language else f': {inline(text)}'}"
        yield ""
        yield from (fenced(text, language), "") if language else ()


def _sign(verdict: GateVerdict) -> str:
    return _SIGNS.get(verdict, _DOUBT)


def _markdown_rows(point: PointVerdict) -> Iterator[tuple[str, ...]]:
    name = inline(point.point)
    for text in point.words:
        yield (name, "", f"{_sign(point.verdict)} {verdict_text(point)}", "", "", "", inline(text))
    for metric in point.metrics:
        verdict = f"{_sign(metric.verdict)} {metric.verdict}{' (waived)' if metric.waived else ''}"
        old, new, change = _numbers(metric)
        yield (name, inline(metric.metric), verdict, inline(old), inline(new), change, inline(_why(metric)))


def render_gate_junit(result: GateResult) -> str:
    """Render a suite per point and a case per metric. Non-deciding and waived metrics are skipped.

    All other metrics that are not green are failures.
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
        text = sentence(point, point.point)
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
