"""Table of old against new: on a terminal, as Markdown, and as CSV."""

import csv
import io
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.compare.words import percent
from cloudai_mbridge.gate.comparison import ComparedPoint, ComparisonTable
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.report.markdown import inline
from cloudai_mbridge.report.rows import spreadsheet_text
from cloudai_mbridge.report.text import with_error

_NO_CHANGE = "~"
_MEAN = "geometric mean"
_COLUMNS = ("point", "old", "new", "change", "runs")
_CSV = (
    *("metric", "unit", "point", "excluded", "old", "old_noise", "new", "new_noise"),
    *("change", "is_significant", "num_old", "num_new"),
)


def render_comparison(table: ComparisonTable) -> Table:
    """Render a row per point, the excluded ones with the reason, and the geometric mean."""
    rendered = Table(title=Text(_title(table)), caption=Text(_caption(table)), title_justify="left")
    rendered.caption_justify = "left"
    rendered.add_column(_COLUMNS[0], overflow="fold")
    for name in _COLUMNS[1:]:
        rendered.add_column(name, justify="right")
    *rows, mean = _rows(table)
    for row in rows:
        rendered.add_row(*(Text(printable(cell)) for cell in row))
    rendered.add_section()
    rendered.add_row(*map(Text, mean))
    return rendered


def render_comparison_markdown(table: ComparisonTable) -> str:
    """Render the same table as Markdown."""
    *rows, mean = _rows(table)
    lines = [
        f"**{inline(_title(table))}**",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(map(inline, row))} |" for row in rows),
        f"| {' | '.join(f'**{inline(cell)}**' if cell else '' for cell in mean)} |",
        "",
        inline(_caption(table)),
    ]
    return "\n".join(lines) + "\n"


def render_comparison_csv(table: ComparisonTable) -> str:
    """Render a row per point at full precision, and the geometric mean."""
    mean = ComparedPoint(_MEAN, "", table.old, table.new, None, None, table.change, False, 0, 0)
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, lineterminator="\n")
    writer.writeheader()
    for point in (*table.points, mean):
        row = {"metric": table.metric, "unit": table.unit, **vars(point)}
        if point is mean:
            row |= dict.fromkeys(("is_significant", "num_old", "num_new"))
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return spreadsheet_text(value) if isinstance(value, str) else value


def _title(table: ComparisonTable) -> str:
    return f"{table.metric} ({table.unit})"


def _caption(table: ComparisonTable) -> str:
    text = f"{_NO_CHANGE} no significant change; ± standard deviation between runs"
    left_out = ", ".join(f"{count} {reason}" for reason, count in table.excluded.items())
    return f"{text}; {counted(sum(table.excluded.values()), 'point')} not in the mean: {left_out}" if left_out else text


def _rows(table: ComparisonTable) -> Iterator[tuple[str, ...]]:
    for point in table.points:
        old, new = _value(point.old, point.old_noise), _value(point.new, point.new_noise)
        yield point.point, old, new, _change(point), f"{point.num_old}+{point.num_new}"
    change = "" if table.change is None else percent(table.change)
    num = len(table.points) - sum(table.excluded.values())
    yield f"{_MEAN} of {counted(num, 'point')}", _value(table.old, None), _value(table.new, None), change, ""


def _change(point: ComparedPoint) -> str:
    if point.excluded or point.change is None:
        return point.excluded
    return percent(point.change) if point.is_significant else _NO_CHANGE


def _value(value: float | None, noise: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if noise is None else with_error(value, value * noise)
