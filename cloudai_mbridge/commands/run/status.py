"""`mbridge status` and `mbridge logs`."""

from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console, show_error
from cloudai_mbridge.commands.run_names import RUN_ROOT
from cloudai_mbridge.errors import OK, BadInput, Damaged
from cloudai_mbridge.logs.tail import tail_lines
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.report.formats.text import visible
from cloudai_mbridge.runner import control


@click.command()
@RUN_ROOT
@click.option("--events", is_flag=True, help="Also print every event.")
def status(root: Path, events: bool) -> int:
    """Show where a run's points stand, from its journal."""
    console, found = new_console(), control.read_status(root, with_events=events)
    table = Table(
        "point", "state", "job", "nodes", "attempts", "why", title=Text(visible(found.scenario)), title_justify="left"
    )
    for row in found.runs:
        cells = (row.key, row.state, row.job_id, row.nodes, str(row.num_attempts or ""), row.why)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console.print(table)
    lines = [f"node {node} is excluded: {reason}" for node, reason in found.excluded.items()]
    lines += [f"{event.at} {event.key or '-'}: {event.text}" for event in found.events]
    counts = ", ".join(f"{count} {state}" for state, count in sorted(found.counts.items()))
    lines.append(f"{counts or 'no runs'}; {_what_next(found, root)}")
    for line in lines:
        console.print_line(visible(line))
    return _show_damage(found)


def _show_damage(found: control.SweepStatus) -> int:
    for text in found.damage:
        show_error(visible(f"damaged: {text}"))
    return Damaged.exit_code if found.damage else OK


def _what_next(found: control.SweepStatus, root: Path) -> str:
    """Say which process holds a run, or how it goes on without one."""
    if found.is_dry_run:
        return "a dry run: nothing was submitted; start its scenario with: mbridge run"
    if found.driver:
        return f"held by {found.driver}"
    return f"no running process holds this run; continue with: mbridge resume {root}" if found.is_open else "finished"


@click.command()
@RUN_ROOT
@click.argument("point", required=False)
@click.option("--stderr", is_flag=True, help="The run's stderr instead of its stdout.")
@click.option("--attempt", type=click.IntRange(min=1), help="An earlier attempt of the run; default: the last.")
@click.option("--lines", "-n", type=click.IntRange(min=0), help="Only the last lines.")
@click.option("--follow", "-f", is_flag=True, help="Follow the log until Ctrl-C.")
def logs(root: Path, point: str | None, stderr: bool, attempt: int | None, lines: int | None, follow: bool) -> int:
    """Print the log of one POINT: its key, or a part of it that no other has. Without one, list the points."""
    if point is None:
        if stderr or follow or attempt is not None or lines is not None:
            raise BadInput(f"POINT: is missing; list the points with: mbridge logs {root}")
        return _list_points(root)
    for line in tail_lines(control.find_log(root, point, attempt, stderr=stderr), lines, follow=follow):
        click.echo(line)
    return OK


def _list_points(root: Path) -> int:
    """Print the key and the state of every point."""
    refuse_dry_run(root, read_plan_data(root))
    found = control.read_status(root)
    width = max((len(row.key) for row in found.runs), default=0)
    for row in found.runs:
        click.echo(visible(f"{row.key:{width}}  {row.state}"))
    return _show_damage(found)
