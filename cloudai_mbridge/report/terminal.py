"""A report on a terminal: one screen at the end of a run, and the table of every point."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.constraints.rule_docs import details_hint
from cloudai_mbridge.errors import counted
from cloudai_mbridge.files.text import clipped, visible
from cloudai_mbridge.metrics import MEASURES, TABLE_MEASURES
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.ranking import PointSummary, causes, excerpt, rank
from cloudai_mbridge.report.text import (
    cause_text,
    cost_text,
    count_text,
    failure_title,
    fastest_text,
    measure_text,
    rejected_text,
    shown_lines,
    windows_text,
)
from cloudai_mbridge.verdict import Verdict

_STYLE = {
    Verdict.SUCCESS: "green",
    Verdict.FAILED: "bold red",
    Verdict.REJECTED: "yellow",
    Verdict.SKIPPED: "yellow",
    Verdict.CANCELLED: "yellow",
    Verdict.UNFINISHED: "cyan",
}
_WITHOUT_A_JOB = (Verdict.FAILED, Verdict.SKIPPED, Verdict.UNFINISHED)
_MOST_REJECTED = 12  # rows
_MOST_ALIKE = 3  # rows of runs that did not run for the same reason; more are one line
_SCREEN, _FEWEST_ROWS = 24, 5  # lines
_FIXED = 7  # the table's head, the line of omitted rows, the files, the prompt
_MOST_CAUSES, _LONGEST = 3, 300
_MOST_REHEARSED = 20  # rows
_MEASURES = tuple(measure for measure in TABLE_MEASURES if measure.width is not None)


def render_ending(report: RunReport, width: int) -> RenderableType:
    """Render the results on one screen of this width: the fastest points, causes of failures, cost.

    Lines of logs may be wider; print them with `crop=False`.
    """
    rankings = rank(report)
    several = len(rankings) > 1
    style = "bold green" if report.succeeded else "bold red"
    above = [_text(f"{report.scenario} on {report.system}: {count_text(report)}", style)]
    if len(rankings) <= _MOST_CAUSES:
        above += [_text(fastest_text(one, several), "green") for one in rankings if one.best]
    rejected = [_text(f"rejected: {rejected_text(report)}", "yellow")] if report.num_rejected else []
    below = [*_causes(report), *rejected, *_notes(report)]
    points = [point for one in rankings for point in one.points]
    used = sum(1 + len(text) // width for text in (*above, *below))
    shown = points[: max(_FEWEST_ROWS, _SCREEN - _FIXED - used)]
    if shown:
        left = len(points) - len(shown)
        more = f"and {counted(left, 'slower point')}" if left else ""
        facts = (more, windows_text(report), cost_text(report))
        below.insert(0, _text("; ".join(filter(None, facts)), style="dim"))
        return Group(*above, _points_table(shown, several, width), *below)
    return Group(*above, *below)


def render_table(report: RunReport, *, all_rejected: bool = True) -> RenderableType:
    """Render all points, the rejected points with their reasons, and then the ends of the failed points' logs.

    all_rejected: False counts more than a few rejected points by rule.
    """
    table = Table(title=_text(f"{report.scenario} on {report.system}"), title_justify="left")
    table.add_column("point", overflow="fold")
    table.add_column("verdict")
    for name in ("steps", *(measure.heading for measure in _MEASURES), "loss"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    several_tests = len({point.test_id for point in report.points}) > 1
    several_runs = any(point.iteration for point in report.points)
    alike = _alike(report.points)
    folded = {point.key for points in alike for point in points}
    by_rule = not all_rejected and report.count(Verdict.REJECTED) > _MOST_REJECTED
    for point in report.points:
        if point.key in folded or (by_rule and point.verdict is Verdict.REJECTED):
            continue
        name = f"{point.test_id}/{point.label}" if several_tests else point.label
        if several_runs and point.verdict is not Verdict.REJECTED:
            name = f"{name}/{point.iteration}"
        _add_row(table, point, name)
    evidence = []
    for point in report.points:
        if lines := shown_lines(point):
            evidence.append(_text(f"{point.key}: {failure_title(point)}", style=_STYLE[point.verdict]))
            evidence += [_text(line, style="dim") for line in lines]
    broken = {violation["rule_id"] for point in report.points for violation in point.violations}
    return Group(
        table,
        *map(_folded, alike),
        *([_rehearsed_table(report)] if report.rehearsed else []),
        *([_text(f"rejected: {rejected_text(report)}; --rejected lists them", "yellow")] if by_rule else []),
        *([_text(hint, "yellow")] if (hint := details_hint(broken)) else []),
        *evidence,
        *_notes(report),
        _text(f"{count_text(report)}; {windows_text(report)}"),
    )


def _points_table(points: Sequence[PointSummary], several_tests: bool, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("point", overflow="fold")
    has_repeats = any(point.num_runs > 1 for point in points)
    names = ["runs"] if has_repeats else []
    measures = [measure for measure in MEASURES if measure.width is not None and width >= measure.width]
    for name in (*names, *(measure.heading for measure in measures)):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        cells = [f"{point.num_good}/{point.num_runs}"] if has_repeats else []
        values = ((measure, point.measures[measure.name]) for measure in measures)
        cells += ["" if value is None and not each.is_statistic else measure_text(value) for each, value in values]
        name = f"{point.test_id}/{point.label}" if several_tests else point.label
        table.add_row(_text(name), *cells)
    return table


def _causes(report: RunReport) -> Iterator[Text]:
    found = causes(report)
    for points in found[:_MOST_CAUSES]:
        verdict = points[0].verdict
        yield _text(f"{verdict}: {cause_text(points)}", style=_STYLE[verdict])
        for line in excerpt(points[0]):  # only the terminal folds it: its paths stay whole in a file and when copied
            text = visible(f"  | {clipped(line, _LONGEST)}")
            yield Text(text, style="dim", no_wrap=True, overflow="ignore")
    if len(found) > _MOST_CAUSES:
        yield _text(f"and {counted(len(found) - _MOST_CAUSES, 'other cause')}")


def _rehearsed_table(report: RunReport) -> Table:
    table = Table(title="Rehearsed before the run", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("point", "rehearsal", "ranks", "parameters", "software", "why"):
        table.add_column(name, justify="right" if name in ("ranks", "parameters") else "left", overflow="fold")
    for point in report.rehearsed[:_MOST_REHEARSED]:
        count = f"{point.states['parameters']:,}" if "parameters" in point.states else ""
        style = {"starts": "green", "refused": "bold red"}.get(point.verdict, "yellow")
        ranks = f"{point.built}/{point.ranks}" if point.ranks else ""
        cells = (
            _text(str(point.verdict), style),
            ranks,
            count,
            _text(point.stack),
            _text(clipped(point.reason, _LONGEST)),
        )
        table.add_row(_text(f"{point.test_id}/{point.label}"), *cells)
    if (more := len(report.rehearsed) - _MOST_REHEARSED) > 0:
        table.add_row(f"and {counted(more, 'other point')}")
    return table


def _notes(report: RunReport) -> Iterator[Text]:
    yield from map(_text, report.notes)
    yield from (_text(f"node {node} was excluded: {reason}") for node, reason in report.excluded_nodes.items())


def _alike(points: Iterable[PointReport]) -> list[list[PointReport]]:
    """Return the groups of many runs that were cancelled, never submitted, or wait, for the same reason."""
    groups: dict[tuple[Any, ...], list[PointReport]] = {}
    for point in points:
        was_never_submitted = not point.attempts and point.verdict in _WITHOUT_A_JOB
        if was_never_submitted or point.verdict is Verdict.CANCELLED:
            groups.setdefault((point.verdict, point.reasons), []).append(point)
    return [group for group in groups.values() if len(group) > _MOST_ALIKE]


def _folded(points: Sequence[PointReport]) -> Text:
    first, verdict = points[0], points[0].verdict
    names = f"{first.key}, {points[1].key}, ..., {points[-1].key}"
    return _text(f"{len(points)} runs {verdict}: {'; '.join(first.reasons)}: {names}", style=_STYLE[verdict])


def _add_row(table: Table, point: PointReport, name: str) -> None:
    verdict = Text(str(point.verdict), style=_STYLE[point.verdict])
    m = point.metrics
    if (
        m is None
    ):  # a line per rule: id, fact, operands. The remedies are printed before the run, and are in report.json
        operands = [", ".join(f"{name}={value}" for name, value in v["operands"].items()) for v in point.violations]
        lines = [f"{v['rule_id']} {v['fact']} ({o})" for v, o in zip(point.violations, operands, strict=True)]
        table.add_row(_text(name), verdict, *[""] * (len(_MEASURES) + 2), _text("\n".join(lines)))
        return
    losses = (m.first_loss, m.last_loss)
    table.add_row(
        _text(name),
        verdict,
        point.steps_text,
        *(measure_text(getattr(m, measure.name)) for measure in _MEASURES),
        " → ".join("?" if loss is None else f"{loss:.3f}" for loss in losses),
        _text("\n".join(point.reasons)),
    )


def _text(text: str, style: str = "") -> Text:
    """Return a text that cannot control the terminal."""
    return Text(visible(text), style=style)
