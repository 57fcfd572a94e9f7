"""report.md: the report for a CI's step summary, in GitHub-flavoured Markdown that shows every text unchanged.

GitHub refuses a summary of more than 1 MiB, so every section has its share of 900 KiB, and counts what did not fit.
"""

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.text import clipped, visible
from cloudai_mbridge.metrics import TABLE_MEASURES
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.text import count_text, failure_title, measure_text, shown_lines, windows_text
from cloudai_mbridge.verdict import Verdict

# All characters of Markdown markup, and the starts of a list. An entity is never markup, and shows as itself
_MARKUP = re.compile(r"""[\\`*_{}\[\]()<>#+!|~&"'$^@]|:(?=\S)|^-|^\d(?=\d*[.)](\s|$))""")
# GitHub makes links, mentions and pictures of plain text: a comment in the middle stops it, and is invisible
_BREAK = "<!-- -->"
_JOINED = "@#:"
_ADDRESS = re.compile(r"(?i)\b(www)(?=\.)")


def inline(text: str) -> str:
    """Return a text for a table cell, a heading or a paragraph; line breaks are kept."""
    return "<br>".join(_line(line) for line in clipped(text).split("\n"))


def _line(text: str) -> str:
    def entity(match: re.Match[str]) -> str:
        return f"&#{ord(match[0])};" + (_BREAK if match[0] in _JOINED else "")

    parts = _ADDRESS.split(visible(text).replace("\t", " "))
    return "".join(f"{part}{_BREAK}" if i % 2 else _MARKUP.sub(entity, part) for i, part in enumerate(parts))


def preformatted(lines: list[str]) -> str:
    """Return lines unchanged, in a block that no line can end: only a tag ends it, and tags are escaped."""
    return "<pre>\n" + "\n".join(html.escape(visible(clipped(line)), quote=False) for line in lines) + "\n</pre>"


def fenced(text: str, language: str) -> str:
    """Return a text unchanged, in a block of code that no line of it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{visible(text).rstrip()}\n{fence}"


def folded(title: str, body: str) -> str:
    """Return a block folded under a title. The blank lines end one block of HTML and begin the next."""
    text = html.escape(" ".join(visible(clipped(title)).split()), quote=False)
    # GitHub looks for no mentions in <code>
    return f"<details><summary><code>{text}</code></summary>\n\n{body}\n\n</details>\n"


_KIB = 1 << 10
_TABLE, _FAILURES, _REJECTED = 380 * _KIB, 290 * _KIB, 60 * _KIB
_NOTES, _NODES, _ENVIRONMENT, _LEFT_OUT = 30 * _KIB, 40 * _KIB, 50 * _KIB, 30 * _KIB
_WORST_FIRST = (Verdict.FAILED, Verdict.CANCELLED, Verdict.SKIPPED, Verdict.SUCCESS)
_COLUMNS = ("point", "verdict", "steps", *(measure.heading for measure in TABLE_MEASURES), "why")
_NUMBERS = _COLUMNS[2:-1]


def render_markdown(report: RunReport) -> str:
    """Render the report: counts, runs with the worst first, failures with evidence, rejected points, environment."""
    verdict = "succeeded" if report.succeeded else "did not succeed"
    title = f"# {inline(report.scenario)} on {inline(report.system)}: {verdict}"
    sections = (
        f"{title}\n\n{count_text(report)}\n",
        _fitting((f"- {inline(note)}\n" for note in report.notes), _NOTES, len(report.notes), "notes"),
        _runs(report),
        _failures(report),
        _rejected(report),
        _pairs("Left out", "point", [(p.name, p.reason) for p in report.left_out], _LEFT_OUT),
        _pairs("Excluded nodes", "node", list(report.excluded_nodes.items()), _NODES),
        _environment(report),
    )
    return "\n".join(section for section in sections if section)


def _runs(report: RunReport) -> str:
    runs = [p for verdict in _WORST_FIRST for p in report.points if p.verdict is verdict]
    if not runs:
        return ""
    rows = _fitting((_row(_cells(point)) for point in runs), _TABLE, len(runs), "runs")
    formulas = {p.metrics.flops_formula for p in runs if p.metrics and p.metrics.flops_formula}
    kinds = {p.metrics.memory_kind for p in runs if p.metrics and p.metrics.memory_kind}
    said = [windows_text(report)]
    said += [f"FLOPs by {inline(', '.join(sorted(formulas)))}"] if formulas else []
    said += [f"memory: {inline(', '.join(sorted(kinds)))}"] if kinds else []
    return f"{_table(_COLUMNS, _NUMBERS)}{rows}\n{'; '.join(said)}\n"


def _cells(point: PointReport) -> Iterator[str]:
    m = point.metrics
    yield inline(point.key)
    yield f"**{point.verdict}**" if point.verdict is Verdict.FAILED else str(point.verdict)
    yield point.steps_text
    for measure in TABLE_MEASURES:
        yield measure_text(getattr(m, measure.name) if m else None)
    yield "<br>".join(map(inline, point.reasons))


def _failures(report: RunReport) -> str:
    def block(point: PointReport) -> str:
        remedy = [f"remedy: {point.failure['remedy']}"] if point.failure else []
        lines = [*point.reasons, *shown_lines(point), *remedy]
        return folded(f"{point.key}: {failure_title(point)}", preformatted(lines))

    failed = [point for point in report.points if point.verdict is Verdict.FAILED]
    return f"## Failures\n\n{_fitting(map(block, failed), _FAILURES, len(failed), 'failures')}" if failed else ""


def _rejected(report: RunReport) -> str:
    """Count the rejected points by rule, each with an example: a point may break several."""
    if not report.num_rejected and not report.count(Verdict.REJECTED):
        return ""
    examples: dict[str, tuple[str, str]] = {}
    for point in report.points:
        for violation in point.violations:
            examples.setdefault(violation["rule_id"], (point.key, violation["message"]))
    counts = {**dict.fromkeys(examples, 0), **report.rule_counts}
    rows = (
        _row((inline(rule), str(count or ""), *map(inline, examples.get(rule, ("", "")))))
        for rule, count in counts.items()
    )
    head = f"## Rejected points\n\n{counted(report.num_rejected, 'point')} broke a rule and did not run.\n\n"
    table = _table(("rule", "points", "example", "why"), ("points",))
    return head + table + _fitting(rows, _REJECTED, len(counts), "rules")


def _pairs(title: str, noun: str, reasons: Sequence[tuple[str, str]], most_bytes: int) -> str:
    """Render a section of names with reasons."""
    rows = (_row(map(inline, pair)) for pair in reasons)
    table = _table((noun, "reason"))
    return f"## {title}\n\n{table}{_fitting(rows, most_bytes, len(reasons), f'{noun}s')}" if reasons else ""


def _environment(report: RunReport) -> str:
    """Render the common environment of the runs once, and list the differences."""
    facts: dict[str, set[str]] = {}
    for point in report.points:
        for name, text in _facts(point.environment):
            facts.setdefault(name, set()).add(text)
    rows = [_row((inline(name), inline("\n".join(sorted(texts))))) for name, texts in facts.items()]
    rows += [_row(("written by", inline(f"cloudai-mbridge {report.tool_version}, {report.created_at}")))]
    own = [(name, text) for name, text in _facts(report.environment) if facts.get(name) != {text}]
    rows += [_row((f"written with {inline(name)}", inline(text))) for name, text in own]
    return "## Environment\n\n" + _table(("what", "version")) + _fitting(rows, _ENVIRONMENT, len(rows), "facts")


def _facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the known facts, flattened."""
    for name, value in environment.items():
        if name == "packages":
            yield from value.items()
        elif isinstance(value, list):
            yield from ((name, _one(item)) for item in value)
        elif value is not None:
            yield name, _one(value)


def _one(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return " ".join(str(part) for name, part in value.items() if part and name != "dirty") + (
        " with changes" if value.get("dirty") else ""
    )


def _table(columns: Sequence[str], numbers: Sequence[str] = ()) -> str:
    return _row(columns) + _row("--:" if name in numbers else "---" for name in columns)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _fitting(blocks: Iterable[str], most_bytes: int, count: int, what: str) -> str:
    """Join the blocks that fit, and count the others."""
    kept: list[str] = []
    for block in blocks:
        most_bytes -= len(block.encode("utf-8", errors="backslashreplace"))
        if most_bytes < 0:
            return "".join(kept) + f"\n{count - len(kept)} more {what} are in report.json.\n"
        kept.append(block)
    return "".join(kept)
