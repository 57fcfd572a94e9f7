"""Old against new: a row per point for one metric, and the geometric mean of the changes.

Table of old against new: on a terminal, as Markdown, and as CSV.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from rich.table import Table
from rich.text import Text

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.runs import METRICS, RunResult, group_by_point, noise_of
from cloudai_mbridge.gate.verdict import GateResult, GateVerdict, MetricVerdict, PointVerdict, percent
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.metrics import Direction
from cloudai_mbridge.report.formats.markdown_text import inline
from cloudai_mbridge.report.formats.steps import spreadsheet_text
from cloudai_mbridge.report.formats.text import with_error

COMPARABLE_METRICS = tuple(name for name, metric in METRICS.items() if metric.direction is not Direction.SAME)
FAILED, INCOMPLETE, ONLY_OLD, ONLY_NEW = "failed", "incomplete", "only in old", "only in new"


@dataclass(frozen=True)
class ComparedPoint:
    """A point on both sides.

    excluded: the reason why it is not in the mean; "" if it is.
    old, new: geometric means over the good runs, None if unknown.
    old_noise, new_noise: relative standard deviations between runs, None for one run.
    change: relative, None if it could not be compared.
    is_significant: whether the change is significant after the correction for all points and metrics.
    """

    point: str
    excluded: str
    old: float | None
    new: float | None
    old_noise: float | None
    new_noise: float | None
    change: float | None
    is_significant: bool
    num_old: int
    num_new: int


@dataclass(frozen=True)
class ComparisonTable:
    """All points of two results, for one metric.

    excluded: number of points that are not in the mean, by reason.
    old, new, change: geometric means over the others, None without any.
    """

    metric: str
    unit: str
    points: tuple[ComparedPoint, ...]
    excluded: Mapping[str, int]
    old: float | None
    new: float | None
    change: float | None


@dataclass(frozen=True)
class _Side:
    """One of the results: the metric's values of the good runs by point, and the points with failed runs."""

    values: Mapping[str, Sequence[float]]
    failed: frozenset[str]

    def numbers(self, point: str) -> tuple[float | None, float | None, int]:
        """Return the mean, the noise, and the number of runs."""
        values = self.values.get(point, ())
        return (geometric_mean(values) if values else None), noise_of(values), len(values)


def tabulate(result: GateResult, metric: str, old: Sequence[RunResult], new: Sequence[RunResult]) -> ComparisonTable:
    """Return the table of a metric, in the order of the runs. result: of the comparison of these runs."""
    before, after = _side(metric, old), _side(metric, new)
    points = [_row(point, metric, before, after) for point in result.points]
    known = {point.point for point in points}
    points += [_unmatched(name, before, after, FAILED) for name in sorted(before.failed) if name not in known]
    order = {name: place for place, name in enumerate(dict.fromkeys(run.point for run in (*old, *new)))}
    points.sort(key=lambda point: order[point.point])
    reasons = [point.excluded for point in points if point.excluded]
    pairs = [(p.old, p.new, p.change) for p in points if not p.excluded]
    olds, news, changes = zip(*pairs, strict=True) if pairs else ((), (), ())
    return ComparisonTable(
        metric=metric,
        unit=METRICS[metric].unit,
        points=tuple(points),
        excluded={reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
        old=_mean(olds),
        new=_mean(news),
        change=math.expm1(fmean(math.log1p(change) for change in changes)) if changes else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None


def _side(metric: str, runs: Iterable[RunResult]) -> _Side:
    points, _ = group_by_point(runs)
    found = {point.point: [METRICS[metric].of(run) for run in point.good] for point in points}
    values = {name: [value[0] for value in of_runs if value] for name, of_runs in found.items()}
    return _Side(values, frozenset(point.point for point in points if point.failed))


def _row(point: PointVerdict, name: str, before: _Side, after: _Side) -> ComparedPoint:
    metric = next((metric for metric in point.metrics if metric.metric == name), None)
    excluded = _excluded(point, metric, before, after)
    if metric is None or metric.change is None:
        return _unmatched(point.point, before, after, excluded)
    return ComparedPoint(
        point=point.point,
        excluded=excluded,
        old=metric.baseline,
        new=metric.value,
        old_noise=metric.baseline_noise,
        new_noise=metric.noise,
        change=metric.change,
        is_significant=metric.is_significant,
        num_old=metric.num_baseline_runs,
        num_new=metric.num_runs,
    )


def _unmatched(name: str, before: _Side, after: _Side, excluded: str) -> ComparedPoint:
    (old, old_noise, num_old), (new, new_noise, num_new) = before.numbers(name), after.numbers(name)
    return ComparedPoint(name, excluded, old, new, old_noise, new_noise, None, False, num_old, num_new)


def _excluded(point: PointVerdict, metric: MetricVerdict | None, before: _Side, after: _Side) -> str:
    """Return the reason why a point is not in the mean, "" if it is."""
    name = point.point
    sides = [side for side in (before, after) if name in side.failed]
    if sides:
        return INCOMPLETE if all(side.values.get(name) for side in sides) else FAILED
    if name not in after.values:
        return ONLY_OLD
    if metric is not None and metric.verdict is not GateVerdict.NOT_RUN and metric.change is not None:
        return ""
    is_new = name not in before.values and metric is None
    return ONLY_NEW if is_new else str((metric or point).verdict)


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
