"""What a gate says, for a CI's step summary, in GitHub-flavoured Markdown."""

from collections.abc import Iterator

from cloudai_mbridge.gate.compare.verdict import GREEN, GateResult, GateVerdict, MetricVerdict, PointVerdict
from cloudai_mbridge.report.formats.gate_terminal import conclude, value_text
from cloudai_mbridge.report.formats.markdown_text import inline

_SIGNS = {GateVerdict.PASS: "✅", GateVerdict.IMPROVEMENT: "🚀", GateVerdict.REGRESSION: "❌"}
_DOUBT = "⚠️"
_COLUMNS = ("point", "metric", "verdict", "reference", "result", "change", "why")
_MOST_ROWS = 2000  # of about 400 bytes each: GitHub refuses more than 1 MiB


def render_gate_markdown(result: GateResult) -> str:
    """Render the conclusion, a row per point and metric with the worst first, and what changed around them."""
    worst_first = sorted(result.points, key=lambda point: point.verdict in GREEN)
    rows = [row for point in worst_first for row in _rows(point)]
    cut = [f"{len(rows) - _MOST_ROWS} more rows are left out"] if len(rows) > _MOST_ROWS else []
    lines = [
        f"# {_sign(result.verdict)} Gate {inline(result.policy)}: {result.verdict}",
        "",
        inline(f"{conclude(result)}; compared with {result.reference}"),
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---|---|---:|---:|---:|---|",
        *(f"| {' | '.join(row)} |" for row in rows[:_MOST_ROWS]),
        "",
        *(f"- {text}" for text in (*cut, *_remarks(result))),
    ]
    return "\n".join(lines) + "\n"


def _sign(verdict: GateVerdict) -> str:
    return _SIGNS.get(verdict, _DOUBT)


def _rows(point: PointVerdict) -> Iterator[tuple[str, ...]]:
    name = inline(point.point)
    for text in point.words:
        yield (name, "", f"{_sign(point.verdict)} {point.verdict}", "", "", "", inline(text))
    for metric in point.metrics:
        yield (name, *_cells(metric))


def _cells(metric: MetricVerdict) -> tuple[str, ...]:
    why = f"{metric.words}; {metric.waived}" if metric.waived else metric.words
    return (
        inline(metric.metric),
        f"{_sign(metric.verdict)} {metric.verdict}{' (waived)' if metric.waived else ''}",
        inline(value_text(metric.baseline, metric.unit)),
        inline(value_text(metric.value, metric.unit)),
        "" if metric.change is None else f"{metric.change:+.2%}",
        inline(why),
    )


def _remarks(result: GateResult) -> Iterator[str]:
    for name, (old, new) in result.environment_changes.items():
        yield f"changed: {inline(name)}: {inline(str(old))} → {inline(str(new))}"
    yield from map(inline, result.notes)
