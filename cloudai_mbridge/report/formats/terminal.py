"""The table at the end of a run."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.report.formats.text import count_text, evidence_title, spread_text, visible, windows_text
from cloudai_mbridge.report.model import PointReport, Report
from cloudai_mbridge.verdict import Verdict

_STYLE = {
    Verdict.SUCCESS: "green",
    Verdict.FAILED: "bold red",
    Verdict.REJECTED: "yellow",
    Verdict.SKIPPED: "yellow",
    Verdict.CANCELLED: "yellow",
}
_MOST_ALIKE = 3  # rows of runs that did not run, for the same reason; more are one line


def render_table(report: Report) -> RenderableType:
    """Render all points, the rejected ones with their reasons, and below them the logs' ends of the failed ones."""
    table = Table(title=_text(f"{report.scenario} on {report.system}"), title_justify="left")
    table.add_column("point", overflow="fold")
    table.add_column("verdict")
    for name in ("steps", "step time (s)", "TFLOP/s/GPU", "tokens/s/GPU", "loss"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    several_tests = len({point.test_id for point in report.points}) > 1
    several_runs = any(point.iteration for point in report.points)
    alike = _alike(report.points)
    folded = {point.key for points in alike for point in points}
    for point in report.points:
        if point.key in folded:
            continue
        name = f"{point.test_id}/{point.label}" if several_tests else point.label
        if several_runs and point.verdict is not Verdict.REJECTED:
            name = f"{name}/{point.iteration}"
        _add_row(table, point, name)
    return Group(
        table,
        *map(_folded, alike),
        *_evidence(report),
        *map(_text, report.notes),
        *(_text(f"node {node} was excluded: {reason}") for node, reason in report.excluded_nodes.items()),
        _text(f"{count_text(report)}; {windows_text(report)}"),
    )


def _alike(points: Iterable[PointReport]) -> list[list[PointReport]]:
    """Return the groups of many runs that were cancelled, or never submitted, for the same reason."""
    groups: dict[tuple[Any, ...], list[PointReport]] = {}
    for point in points:
        was_never_submitted = not point.attempts and point.verdict in (Verdict.FAILED, Verdict.SKIPPED)
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
    if m is None:
        table.add_row(_text(name), verdict, *[""] * 5, _text(_broken_rules(point)))
        return
    losses = (m.first_loss, m.last_loss)
    table.add_row(
        _text(name),
        verdict,
        f"{len(point.steps)}/{point.num_steps or '?'}",
        spread_text(m.step_time_s),
        spread_text(m.tflops_per_gpu),
        spread_text(m.tokens_per_s_per_gpu),
        " → ".join("?" if loss is None else f"{loss:.3f}" for loss in losses),
        _text("\n".join(point.reasons)),
    )


def _broken_rules(point: PointReport) -> str:
    """One line per rule: id, fact, operands. The remedies stood before the run, and stand in report.json."""
    operands = [", ".join(f"{name}={value}" for name, value in v["operands"].items()) for v in point.violations]
    return "\n".join(f"{v['rule_id']} {v['fact']} ({o})" for v, o in zip(point.violations, operands, strict=True))


def _evidence(report: Report) -> Iterator[Text]:
    for point in report.points:
        if point.evidence:
            yield _text(f"{point.key}: {evidence_title(point)}", style=_STYLE[point.verdict])
            yield from (_text(f"  | {line}", style="dim") for line in point.evidence)


def _text(text: str, style: str = "") -> Text:
    """Return a text that cannot control the terminal."""
    return Text(visible(text), style=style)
