"""Old against new for one metric: a row per point and the geometric mean, on a terminal, as Markdown, and as CSV."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from rich.table import Table
from rich.text import Text

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.runs import METRICS, PointRuns, RunResult, group_by_point, noise_of
from cloudai_mbridge.gate.verdict import GateResult, GateVerdict, PointVerdict, percent
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.metrics import Direction
from cloudai_mbridge.report.markdown import inline
from cloudai_mbridge.report.rows import spreadsheet_text
from cloudai_mbridge.report.text import with_error

COMPARABLE_METRICS = tuple(name for name, metric in METRICS.items() if metric.direction is not Direction.SAME)
FAILED, INCOMPLETE, ONLY_OLD, ONLY_NEW = "failed", "incomplete", "only in old", "only in new"
_NO_CHANGE, _ALONE = "~", "(n=1)"
_MEAN = "geometric mean"
_COLUMNS = ("point", "old", "new", "change", "runs")
_CSV = (
    *("metric", "unit", "point", "excluded", "old", "old_noise", "new", "new_noise"),
    *("change", "is_significant", "num_old", "num_new"),
)


@dataclass(frozen=True)
class ComparedPoint:
    """A point on both sides.

    excluded: the reason why it is not in the mean; "" if it is.
    old, new: geometric means over the good runs, None if unknown.
    old_noise, new_noise: relative standard deviations between runs, None for one run.
    change: relative, None if a side is unknown.
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


def tabulate(result: GateResult, metric: str, old: Sequence[RunResult], new: Sequence[RunResult]) -> ComparisonTable:
    """Return the table of a metric, in the order of the runs. result: of the comparison of these runs."""
    before, after = ({point.point: point for point in group_by_point(runs)[0]} for runs in (old, new))
    verdicts: dict[str, list[PointVerdict | None]] = {}
    for point in result.points:  # a name may occur twice: its old work may be missing from the new side
        verdicts.setdefault(point.point, []).append(point)
    points = []
    for name in dict.fromkeys(run.point for run in (*old, *new)):
        sides = before.get(name, PointRuns(name)), after.get(name, PointRuns(name))
        for verdict in verdicts.get(name, [None] if sides[0].failed else []):
            points.append(_compare(metric, *sides, verdict))
    reasons = [point.excluded for point in points if point.excluded]
    pairs = [(p.old, p.new, p.change) for p in points if not p.excluded and p.change is not None]
    olds, news, changes = zip(*pairs, strict=True) if pairs else ((), (), ())
    return ComparisonTable(
        metric=metric,
        unit=METRICS[metric].unit,
        points=tuple(points),
        excluded={reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
        old=geometric_mean(olds) if olds else None,
        new=geometric_mean(news) if news else None,
        change=math.expm1(fmean(math.log1p(change) for change in changes)) if changes else None,
    )


def _compare(name: str, before: PointRuns, after: PointRuns, point: PointVerdict | None) -> ComparedPoint:
    """Compare a metric of a point. point: its verdict, None if all its runs on the old side failed."""
    metric = next((metric for metric in point.metrics if metric.metric == name), None) if point else None
    old, new = ([run.values[name][0] for run in side.good if name in run.values] for side in (before, after))
    failed = [values for side, values in ((before, old), (after, new)) if side.failed]
    if failed:
        excluded = INCOMPLETE if point and all(failed) else FAILED
    elif not after.good:
        excluded = ONLY_OLD
    elif metric is not None and metric.verdict is not GateVerdict.NOT_RUN and metric.change is not None:
        excluded = ""
    elif metric is None and not before.good:
        excluded = ONLY_NEW
    elif metric is not None and metric.verdict is GateVerdict.INCONCLUSIVE and old and new:
        excluded = ""  # as one run on each side: it is compared, and what it proves is another matter
    else:
        excluded = str(metric.verdict if metric else point.verdict if point else GateVerdict.NOT_RUN)
    if metric is None or metric.change is None:
        numbers = [(geometric_mean(values) if values else None, noise_of(values), len(values)) for values in (old, new)]
        (mean, noise, num_old), (new_mean, new_noise, num_new) = numbers
        change = new_mean / mean - 1 if mean and new_mean else None
        return ComparedPoint(before.point, excluded, mean, new_mean, noise, new_noise, change, False, num_old, num_new)
    return ComparedPoint(
        point=before.point,
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
        else:
            row["is_significant"] = str(point.is_significant).lower()
        writer.writerow({name: spreadsheet_text(v) if isinstance(v, str) else v for name, v in row.items()})
    return text.getvalue()


def _title(table: ComparisonTable) -> str:
    return f"{table.metric} ({table.unit})"


def _caption(table: ComparisonTable) -> str:
    text = f"{_NO_CHANGE} no significant change; ± standard deviation between runs; {_ALONE}: unknown, of a single run"
    left_out = ", ".join(f"{count} {reason}" for reason, count in table.excluded.items())
    return f"{text}; {counted(sum(table.excluded.values()), 'point')} not in the mean: {left_out}" if left_out else text


def _rows(table: ComparisonTable) -> Iterator[tuple[str, ...]]:
    for point in table.points:
        change = point.excluded
        if point.change is not None:
            change = percent(point.change)
            if point.excluded:
                change = f"{change}, {point.excluded}"
            elif min(point.num_old, point.num_new) < 2:
                change = f"{change} {_ALONE}"
            elif not point.is_significant:
                change = f"{_NO_CHANGE} {change}"
        sides = _value(point.old, point.old_noise), _value(point.new, point.new_noise)
        yield point.point, *sides, change, f"{point.num_old}+{point.num_new}"
    change = "" if table.change is None else percent(table.change)
    num = len(table.points) - sum(table.excluded.values())
    yield f"{_MEAN} of {counted(num, 'point')}", _value(table.old, None), _value(table.new, None), change, ""


def _value(value: float | None, noise: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if noise is None else with_error(value, value * noise)
