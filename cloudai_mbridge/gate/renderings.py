"""Result of a gate: as sentences, on a terminal, as Markdown for a CI's step summary, and as JUnit XML."""

import math
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.text import label, visible
from cloudai_mbridge.gate.next_steps import NextSteps
from cloudai_mbridge.gate.verdict import GREEN, GateResult, GateVerdict, MetricVerdict, PointVerdict, percent
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.metrics import PRIMARY
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
_SIGNS = {
    **dict.fromkeys(GateVerdict, "⚠️"),
    **{GateVerdict.PASS: "✅", GateVerdict.IMPROVEMENT: "🚀", GateVerdict.REGRESSION: "❌"},
}
_COLUMNS = ("point", "metric", "verdict", "reference", "result", "change", "why")
_MOST_ROWS = 2000  # of about 400 bytes each: GitHub refuses more than 1 MiB
_MOST_LINES, _MOST_CHANGES, _MOST_OTHERS = 20, 8, 3
_ROUNDING = 1e-9  # of a limit in percent, which is rounded up
_WHOLE = "(the point)"
INCOMPLETE = "incomplete"


def headline(result: GateResult) -> str:
    """Return the headline: the worst finding, and the number of similar points."""
    names = _names(result.points)
    rows = [point for point in result.rows if point.verdict is result.verdict]
    if not result.points:
        return "there is no point to judge"
    if result.verdict is GateVerdict.PASS:
        return "; ".join(_green(result, names))
    together = [point for point in rows if point in result.shared]
    if together:
        return sentence(together[0], together[0].point)
    worst = max(rows, key=_size, default=result.points[0])
    text = sentence(worst, names[worst.point])
    text = text if len(rows) <= 1 else f"{len(rows)} of {counted(len(result.points), 'point')} {_kind(rows)} {text}"
    return "; ".join([text, *_excused(result, names)]) if result.verdict in GREEN else text


def _green(result: GateResult, names: Mapping[str, str]) -> Iterator[str]:
    """Yield what the bounds of a pass rule out, then the regressions and doubts that the policy lets pass."""
    where = result.reference.partition(" ")[0]
    reference = f"the {where}" if where in ("baseline", "history") else result.reference
    metrics = [(point, metric) for point in result.rows for metric in point.metrics if metric.metric == PRIMARY]
    decided = [metric for _, metric in metrics if metric.verdict in GREEN]
    slowest = max((max(m.interval[1], m.change or 0.0) for m in decided if m.interval is not None), default=None)
    own = {point.point for point in result.points}
    count = counted(len({point.point for point, m in metrics if m.verdict in GREEN and point.point in own}), "point")
    other = "" if len(decided) == len(metrics) else " other"
    if slowest is not None:
        limit = math.ceil(100 * slowest - _ROUNDING)
        worse = f"more than {limit} % slower" if limit > 0 else "slower"
        yield f"no{other} point is {worse} than {reference} ({count})"
    elif not metrics:
        yield f"nothing is worse than {reference} beyond the policy's limits ({counted(len(result.points), 'point')})"
    yield from _excused(result, names)


def _excused(result: GateResult, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the waived regressions, then the undecided metrics that do not decide: each kind with its worst case."""
    found = [(point, metric) for point in result.rows for metric in point.metrics]
    waived = [each for each in found if each[1].waived]
    doubts = [each for each in found if each not in waived and _is_doubt(each[1])]
    for title, cases in (("waived", waived), ("not decided", doubts)):
        # Of the step time first, which every row has; then the largest change
        cases.sort(key=lambda each: (each[1].metric != PRIMARY, -abs(each[1].change or 0.0)))
        for point, metric in cases[:1]:
            change = f" {_change(metric)}" if metric.change is not None else ""
            more = f", and {len(cases) - 1} more" if len(cases) > 1 else ""
            yield f"{title}: {metric.metric} of {names.get(point.point, point.point)}{change}{more}"


def _is_doubt(metric: MetricVerdict) -> bool:
    return metric.verdict not in GREEN and not metric.decides and not metric.words.startswith("follows")


def _change(metric: MetricVerdict) -> str:
    """Return a change with its bounds."""
    assert metric.change is not None
    bounds = f" ({percent(metric.interval[0])} to {percent(metric.interval[1])})" if metric.interval else ""
    return f"{percent(metric.change)}{bounds}"


def sign(result: GateResult) -> str:
    """Return the sign of a verdict; a step time that is not decided takes the green sign away."""
    doubts = any(m.metric == PRIMARY and not m.waived and _is_doubt(m) for row in result.rows for m in row.metrics)
    return _SIGNS[GateVerdict.INCONCLUSIVE if result.verdict in GREEN and doubts else result.verdict]


def findings(result: GateResult) -> list[tuple[PointVerdict, str]]:
    """Return shared findings and every point that is not green, the worst first, each with its sentence."""
    names = _names(result.points)
    order = list(GateVerdict)
    red = sorted(
        (row for row in result.rows if row.verdict not in GREEN),
        key=lambda row: (row not in result.shared, order.index(row.verdict), -_size(row)),
    )
    return [(row, sentence(row, names.get(row.point, row.point))) for row in red]


def sentence(point: PointVerdict, name: str) -> str:
    """Explain a point's verdict. name: of the point, or of the points that share it."""
    metric = _decisive(point)
    if point.words and (metric is None or point.verdict in (GateVerdict.NOT_RUN, GateVerdict.NOT_COMPARABLE)):
        return f"{name}: {'; '.join(point.words)}"
    if metric is None:
        return f"{name}: {point.verdict}"
    if point.verdict is GateVerdict.INCONCLUSIVE:
        return f"{name}: {metric.metric} is not decided: {metric.words.partition('); ')[2] or metric.words}"
    if metric.change is None or point.verdict in (GateVerdict.NOT_RUN, GateVerdict.NOT_COMPARABLE):
        return f"{name}: {metric.metric}: {metric.words}"
    if metric.baseline is None or metric.value is None:  # only the change of a shared finding is known
        own = metric.words.removeprefix(name)
        return f"{name}: {own}" if own == metric.words else f"{name}{own.partition(' (')[0]}"
    values = f"{metric.baseline:.4g} -> {metric.value:.4g} {metric.unit}".rstrip()
    more, less = ("slow", "fast") if metric.metric == PRIMARY else ("high", "low")
    subject = name if metric.metric == PRIMARY else f"{metric.metric} of {name}"
    return f"{subject} is {_amount(metric.change, more, less)}: {values}"


def _amount(change: float, more: str, less: str) -> str:
    """Return "9.1 % slower"; for a factor of two or more, "2.5 times as slow". more, less: adjectives."""
    if change >= 1:
        return f"{1 + change:.2g} times as {more}" if change < 99 else f"{1 + change:.0f} times as {more}"
    return f"{100 * abs(change):.1f} % {more if change > 0 else less}er"


def verdict_text(point: PointVerdict) -> str:
    """Name a verdict: a point with some good runs is incomplete, not "not run"."""
    return INCOMPLETE if point.verdict is GateVerdict.NOT_RUN and point.runs else str(point.verdict)


def conclusion(result: GateResult) -> str:
    """Return the number of points by verdict, and the error rate."""
    counts = Counter(verdict_text(point) for point in result.points)
    points = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no points"
    red = {verdict_text(point) for point in result.rows if point.verdict is result.verdict}
    verdict = INCOMPLETE if red == {INCOMPLETE} else str(result.verdict)
    return f"{verdict.upper()}: {points}; false-alarm rate at most {result.false_alarm_rate:.1%}"


def _kind(points: Sequence[PointVerdict]) -> str:
    """Return the predicate of a sentence about several points with one verdict."""
    metrics = [_decisive(point) for point in points]
    is_time = all(metric is not None and metric.metric == PRIMARY for metric in metrics)
    match points[0].verdict:
        case GateVerdict.REGRESSION:
            return f"are {'slower' if is_time else 'worse'}; the worst:"
        case GateVerdict.IMPROVEMENT:
            return f"are {'faster' if is_time else 'better'}; the best:"
        case GateVerdict.NOT_RUN:
            is_partial = any(point.runs for point in points)
            return f"are {INCOMPLETE}, such as" if is_partial else "have no result, such as"
        case GateVerdict.NOT_COMPARABLE:
            return "are not comparable, such as"
        case _:
            return "are not decided, such as"


def decisive_metrics(point: PointVerdict) -> list[MetricVerdict]:
    """Return the metrics that determine a point's verdict."""
    return [m for m in point.metrics if m.verdict is point.verdict and m.decides and not m.waived]


def _decisive(point: PointVerdict) -> MetricVerdict | None:
    return next(iter(decisive_metrics(point)), None)


def _size(point: PointVerdict) -> float:
    metric = _decisive(point)
    return abs(metric.change) if metric and metric.change is not None else 0.0


def _names(points: Sequence[PointVerdict]) -> dict[str, str]:
    """Return the points' names, test/label; a test's only point without coordinates is the test."""
    tests = Counter(point.point.partition("/")[0] for point in points)
    ends = f"/{label({})}"
    return {
        point.point: test if point.point == f"{test}{ends}" and tests[test] == 1 else point.point
        for point in points
        for test in [point.point.partition("/")[0]]
    }


def render_gate(result: GateResult, *, in_table: bool = False) -> list[tuple[str, str]]:
    """Return lines with their styles: the headline, the points that are not green, and other notable facts.

    in_table: a table of the points precedes, so points that share a sentence share a line.
    """
    found = findings(result)
    lines = [(headline(result), _STYLES[result.verdict])]
    if in_table:
        found = _by_sentence(found)
    for point, text in found[:_MOST_LINES]:
        metrics = [metric for metric in decisive_metrics(point) if not metric.words.startswith("follows")]
        also = f"; also {', '.join(metric.metric for metric in metrics[1:])}" if metrics[1:] else ""
        if len(found) > 1:
            lines.append((f"  {text}{_bounds(metrics[0]) if metrics else ''}{also}", _STYLES[point.verdict]))
        elif metrics:  # its sentence is the headline
            lines.append((f"  {metrics[0].metric}: {metrics[0].words}{also}", _STYLES[point.verdict]))
    rest = len(found) - _MOST_LINES
    lines += [(f"  and {rest} more", "")] if rest > 0 else []
    lines += [(text, "") for text in _also(result)]
    lines += [(f"{conclusion(result)}; compared with {result.reference}", "dim")]
    return [(printable(text), style) for text, style in lines]


def _by_sentence(found: Sequence[tuple[PointVerdict, str]]) -> list[tuple[PointVerdict, str]]:
    """Return a line for all points with the same sentence."""
    groups: dict[str, list[tuple[PointVerdict, str]]] = {}
    for point, text in found:
        groups.setdefault(sentence(point, ""), []).append((point, text))
    return [
        (rows[0][0], f"{counted(len(rows), 'point')}{same}" if len(rows) > 1 else rows[0][1])
        for same, rows in groups.items()
    ]


def _bounds(metric: MetricVerdict) -> str:
    if metric.interval is None or metric.verdict is not GateVerdict.REGRESSION:
        return ""
    runs = f", {counted(metric.num_runs, 'run')} against {metric.num_baseline_runs}" if metric.num_runs else ""
    return f" ({percent(metric.interval[0])} to {percent(metric.interval[1])}{runs})"


def _also(result: GateResult) -> Iterator[str]:
    """Yield a few lines: waived metrics, outlier runs in green points, changes, and notes."""
    waived = [f"waived: {p.point} {m.metric}: {m.waived}" for p in result.rows for m in p.metrics if m.waived]
    outliers = [f"{p.point}: {text}" for p in result.rows if p.verdict in GREEN for text in p.words]
    changes = [f"{name} {old} -> {new}" for name, (old, new) in result.environment_changes.items()]
    more = f"; and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
    changed = [f"changed: {'; '.join(changes[:_MOST_CHANGES])}{more}"] if changes else []
    for texts in (waived, outliers, changed, [f"note: {note}" for note in result.notes]):
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
            verdict = Text(str(metric.verdict), style=_STYLES[metric.verdict])
            verdict = Text(f"{metric.verdict} (waived)", style="yellow") if metric.waived else verdict
            detectable = "" if metric.detectable is None else f"{metric.detectable:.1%}"
            table.add_row(
                *(Text(name), Text(metric.metric), verdict),
                *map(Text, (old, new, change, detectable, printable(_why(metric)))),
            )
        for text in point.words:
            verdict = Text(verdict_text(point), style=_STYLES[point.verdict])
            table.add_row(Text(name), "", verdict, "", "", "", "", Text(printable(text)))
    found = result.environment_changes.items()
    changes = [Text(printable(f"changed: {name}: {old} → {new}")) for name, (old, new) in found]
    notes = [Text(f"note: {printable(note)}") for note in result.notes]
    return Group(table, *changes, *notes)


def _numbers(metric: MetricVerdict) -> tuple[str, str, str]:
    """Return reference, result and change, "" if unknown."""
    old, new = (
        "" if value is None else f"{value:.4g} {metric.unit}".rstrip() for value in (metric.baseline, metric.value)
    )
    return old, new, "" if metric.change is None else f"{metric.change:+.2%}"


def _why(metric: MetricVerdict) -> str:
    return f"{metric.words}; {metric.waived}" if metric.waived else metric.words


def render_gate_markdown(result: GateResult, steps: NextSteps | None = None) -> str:
    """Render the headline, a line per point that is not green, the conclusion, the next steps, and the details.

    The details are a row per point and metric with the worst first, and the changes in the environment.
    """
    worst_first = sorted(result.rows, key=lambda point: point.verdict in GREEN)
    rows = [row for point in worst_first for row in _markdown_rows(point)]
    remarks = [f"{len(rows) - _MOST_ROWS} more rows are left out"] if len(rows) > _MOST_ROWS else []
    for name, pair in result.environment_changes.items():
        remarks.append(f"changed: {inline(name)}: {' → '.join(inline(str(value)) for value in pair)}")
    step_lines = []  # a line per step, with its command in a block
    for title, language, text in steps.titled() if steps else ():
        step_lines += [f"**{inline(title)}**{'' if language else f': {inline(text)}'}", ""]
        step_lines += [fenced(text, language), ""] if language else []
    found = findings(result)
    found = found if len(found) > 1 else []  # a single finding is the title
    more = [f"- and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    lines = [
        f"# {sign(result)} {inline(headline(result))}",
        "",
        *(f"- {inline(text)}" for _, text in found[:_MOST_LINES]),
        *more,
        *([""] if found else []),
        inline(f"Gate {result.policy}: {conclusion(result)}; compared with {result.reference}"),
        "",
        *step_lines,
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---|---|---:|---:|---:|---|",
        *(f"| {' | '.join(row)} |" for row in rows[:_MOST_ROWS]),
        "",
        *(f"- {text}" for text in (*remarks, *map(inline, result.notes))),
    ]
    return "\n".join(lines) + "\n"


def _markdown_rows(point: PointVerdict) -> Iterator[tuple[str, ...]]:
    name = inline(point.point)
    for text in point.words:
        yield (name, "", f"{_SIGNS[point.verdict]} {verdict_text(point)}", "", "", "", inline(text))
    for metric in point.metrics:
        verdict = f"{_SIGNS[metric.verdict]} {metric.verdict}{' (waived)' if metric.waived else ''}"
        old, new, change = _numbers(metric)
        yield (name, inline(metric.metric), verdict, inline(old), inline(new), change, inline(_why(metric)))


def render_gate_junit(result: GateResult) -> str:
    """Render a suite per point and a case per metric. Non-deciding and waived metrics are skipped.

    All other metrics that are not green are failures.
    """
    root = ET.Element("testsuites", name=visible(f"gate {result.policy}"))
    for point in result.rows:
        suite = ET.SubElement(root, "testsuite", name=visible(point.point))
        # Of the point itself, which fails whenever the point is not green
        case = ET.SubElement(suite, "testcase", name=_WHOLE, classname=visible(point.point))
        if point.verdict not in GREEN:
            text = sentence(point, point.point)
            ET.SubElement(case, "failure", message=visible(text), type=str(point.verdict))
        for metric in point.metrics:
            case = ET.SubElement(suite, "testcase", name=metric.metric, classname=visible(point.point))
            if metric.waived:
                ET.SubElement(case, "skipped", message=visible(metric.waived))
            elif metric.verdict in GREEN:
                ET.SubElement(case, "system-out").text = visible(metric.words)
            elif metric.decides:
                ET.SubElement(case, "failure", message=visible(metric.words), type=str(metric.verdict))
            else:
                ET.SubElement(case, "skipped", message=visible(f"{metric.verdict}: {metric.words}"))
        set_counts(suite)
    if not result.points:
        _add_only_case(root, "(any point)", "error", "there is no point to judge", str(result.verdict))
    set_counts(root)
    return xml_text(root)


def render_none_promoted_junit(policy: str, text: str) -> str:
    """Render a skipped case: without a baseline nothing was judged. text: how the first one is promoted."""
    root = ET.Element("testsuites", name=visible(f"gate {policy}"))
    _add_only_case(root, "(baseline)", "skipped", visible(text), "NonePromoted")
    set_counts(root)
    return xml_text(root)


def _add_only_case(root: ET.Element, name: str, tag: str, message: str, kind: str) -> None:
    suite = ET.SubElement(root, "testsuite", name="gate")
    case = ET.SubElement(suite, "testcase", name=name, classname="gate")
    ET.SubElement(case, tag, message=message, type=kind)
    set_counts(suite)
