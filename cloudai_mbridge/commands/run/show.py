"""`mbridge show`: print every point of a run, or the details of one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.json_output import print_json
from cloudai_mbridge.commands.options import JSON, REJECTED
from cloudai_mbridge.commands.run_names import run_argument
from cloudai_mbridge.errors import OK, BadInput
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.report.build import build_report
from cloudai_mbridge.report.formats.details import render_details
from cloudai_mbridge.report.formats.terminal import render_table
from cloudai_mbridge.report.model import PointReport
from cloudai_mbridge.runner.lock import reading
from cloudai_mbridge.verdict import Verdict

_MOST_NAMED = 5


@click.command()
@run_argument("root")
@click.argument("point", required=False)
@REJECTED
@JSON
def show(root: Path, point: str | None, as_json: bool, all_rejected: bool) -> int:
    """Show every point of a run, or all about one POINT: its key, its label, or a part that no other point has."""
    refuse_dry_run(root, read_plan_data(root))
    with reading(root) as held_by:
        report = build_report(root, held_by)
    if point is not None:
        report = replace(report, points=tuple(_find(report.points, point.strip("/"), root)))
    if as_json:
        data = report.to_dict()
        print_json(data if point is None else {"points": data["points"]})
        return OK
    console = new_console()
    console.print(render_table(report, all_rejected=all_rejected or point is not None))
    for each in report.points if point is not None else ():
        if each.verdict is not Verdict.REJECTED:
            console.print_line(f"\n{each.key}\n{render_details(each, root)}")
    return OK


def _find(points: Sequence[PointReport], name: str, root: Path) -> list[PointReport]:
    """Return all runs of a point, or one run."""
    found = [point for point in points if name in (point.key, point.label, f"{point.test_id}/{point.label}")]
    found = found or [point for point in points if name in point.key]
    if not found:
        raise BadInput(f"{root}: has no point {name!r}; `mbridge show {root}` lists them")
    if len(names := dict.fromkeys(f"{point.test_id}/{point.label}" for point in found)) > 1:
        more = ", ..." if len(names) > _MOST_NAMED else ""
        raise BadInput(
            f"{name!r} is ambiguous: it matches {len(names)} points: {', '.join([*names][:_MOST_NAMED])}{more};"
            " give more of it"
        )
    return found
