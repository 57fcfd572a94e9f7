"""`mbridge status` and `mbridge logs`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console, show_error
from cloudai_mbridge.commands.json_output import print_json
from cloudai_mbridge.commands.options import JSON
from cloudai_mbridge.commands.run_names import RUN_ROOT
from cloudai_mbridge.errors import OK, BadInput, Damaged
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.logs.tail import tail_lines
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.journal import Event


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands. runs: of its points. held_by: the process that drives it. is_open: some have not ended.

    counts: runs by state. excluded_nodes: name -> why. events: none without --events.
    left_out: points that were not chosen to run.
    """

    path: Path
    scenario: str
    is_dry_run: bool
    is_open: bool
    held_by: str | None
    counts: Mapping[str, int]
    runs: tuple[control.RunState, ...]
    excluded_nodes: Mapping[str, str]
    events: tuple[Event, ...]
    damage: tuple[str, ...]
    left_out: int


@click.command()
@RUN_ROOT
@click.option("--events", is_flag=True, help="Also print every event.")
@JSON
def status(root: Path, events: bool, as_json: bool) -> int:
    """Show where a run's points stand, from its journal."""
    console, found = new_console(), control.read_status(root, with_events=events)
    if as_json:
        return _print_status(root, found)
    table = Table(
        "point", "state", "job", "nodes", "attempts", "why", title=Text(visible(found.scenario)), title_justify="left"
    )
    for row in found.runs:
        cells = (row.key, row.state, row.job_id, row.nodes, str(row.num_attempts or ""), row.why)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console.print(table)
    lines = [f"node {node} is excluded: {reason}" for node, reason in found.excluded.items()]
    lines += [f"{event.at} {event.key or '-'}: {event.text}" for event in found.events]
    states = {**found.counts, **({"left out": found.left_out} if found.left_out else {})}
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    lines.append(f"{counts or 'no runs'}; {_what_next(found, root)}")
    for line in lines:
        console.print_line(visible(line))
    return _show_damage(found)


def _print_status(root: Path, found: control.SweepStatus) -> int:
    print_json(
        RunStatus(
            path=root,
            scenario=found.scenario,
            is_dry_run=found.is_dry_run,
            is_open=found.is_open,
            held_by=found.driver,
            counts=found.counts,
            runs=found.runs,
            excluded_nodes=found.excluded,
            events=found.events,
            damage=found.damage,
            left_out=found.left_out,
        )
    )
    return _show_damage(found)


def _show_damage(found: control.SweepStatus) -> int:
    for text in found.damage:
        show_error(visible(f"damaged: {text}"))
    return Damaged.exit_code if found.damage else OK


def _what_next(found: control.SweepStatus, root: Path) -> str:
    """Return the process that holds a run, or how to continue the run without one."""
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
@JSON
def logs(
    root: Path, point: str | None, stderr: bool, attempt: int | None, lines: int | None, follow: bool, as_json: bool
) -> int:
    """Print the log of one POINT: its key, or a part of it that no other has. Without one, list the points."""
    if point is None:
        if stderr or follow or attempt is not None or lines is not None:
            raise BadInput(f"missing argument POINT; list the points with: mbridge logs {root}")
        return _list_points(root, as_json=as_json)
    if as_json:
        raise BadInput("--json: lists the points; a log is text: leave --json out, or POINT")
    for line in tail_lines(control.find_log(root, point, attempt, stderr=stderr), lines, follow=follow):
        click.echo(line)
    return OK


def _list_points(root: Path, *, as_json: bool) -> int:
    """Print the key and the state of every point, or the document of `mbridge status --json`."""
    refuse_dry_run(root, read_plan_data(root))
    found = control.read_status(root)
    if as_json:
        return _print_status(root, found)
    width = max((len(row.key) for row in found.runs), default=0)
    for row in found.runs:
        click.echo(visible(f"{row.key:{width}}  {row.state}"))
    return _show_damage(found)
