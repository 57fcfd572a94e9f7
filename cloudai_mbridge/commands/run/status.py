"""`mbridge runs`, `status` and `logs`: where runs and their points stand."""

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import click
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import new_console, print_json, show_error
from cloudai_mbridge.commands.options import JSON, PATH, RUN_ROOT
from cloudai_mbridge.errors import OK, BadInput, Damaged, MBridgeError, counted
from cloudai_mbridge.files.documents import json_object
from cloudai_mbridge.files.run_files import ROOT_FILES, started_at
from cloudai_mbridge.files.text import clipped, visible
from cloudai_mbridge.logs.tail import tail_lines
from cloudai_mbridge.plan.read import find_runs, read_plan_data, refuse_dry_run
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.observe import Observed
from cloudai_mbridge.schedulers.interface import PENDING
from cloudai_mbridge.verdict import Verdict

_MOST_ROWS = 50


@click.command()
@RUN_ROOT
@click.option("--events", is_flag=True, help="Also print every event.")
@click.option("--all", "is_whole", is_flag=True, help=f"Print every point; default: at most {_MOST_ROWS}.")
@JSON
def status(root: Path, events: bool, is_whole: bool, as_json: bool) -> int:
    """Show where a run's points stand: from its journal, and, if no process holds it, from Slurm.

    Of many points, those that failed and those that run come first.
    """
    console, found = new_console(), pipeline.read_status(root, with_events=events)
    if as_json:
        print_json(found)
        return _show_damage(found)
    shown = found.runs if is_whole or len(found.runs) <= _MOST_ROWS else _most_urgent(found.runs)
    table = Table(
        "point", "state", "job", "nodes", "attempts", "why", title=Text(visible(found.scenario)), title_justify="left"
    )
    for row in shown:
        cells = (row.key, row.state, row.job_id, row.nodes, str(row.num_attempts or ""), row.why)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console.print(table)
    lines = [f"and {_counts_text(found.runs, shown)}; --all lists them"] if len(shown) < len(found.runs) else []
    lines += [f"node {node} is excluded: {reason}" for node, reason in found.excluded_nodes.items()]
    lines += [f"{event.at} {event.key or '-'}: {event.text}" for event in found.events]
    if found.is_dry_run:
        next_step = "a dry run: nothing was submitted; start its scenario with: mbridge run"
    elif found.held_by or found.is_open:
        next_step = found.driver_text
        next_step += "" if found.held_by else f"; continue with: mbridge resume {root}"
    else:
        next_step = "finished"
    states = {**found.counts, **({"left out": found.left_out} if found.left_out else {})}
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    lines.append(f"{counts or 'no runs'}; {next_step}")
    for line in lines:
        console.print_line(visible(line))
    return _show_damage(found)


def _most_urgent(rows: Sequence[control.RunState]) -> list[control.RunState]:
    """Return the rows to print of many: failed and active ones first, then the next; each kind in the plan's order."""

    def urgency(row: control.RunState) -> int:
        if not row.is_open:
            return 3 if row.state == Verdict.SUCCESS else 0
        return 1 if row.num_attempts and row.state != PENDING.lower() else 2

    chosen = sorted(range(len(rows)), key=lambda place: urgency(rows[place]))[:_MOST_ROWS]
    return [rows[place] for place in sorted(chosen)]


def _counts_text(rows: Sequence[control.RunState], shown: Sequence[control.RunState]) -> str:
    """Count the rows that are not shown."""
    left = Counter(row.state for row in rows) - Counter(row.state for row in shown)
    return f"{sum(left.values()):,} more: {', '.join(f'{count:,} {state}' for state, count in sorted(left.items()))}"


def _show_damage(found: control.RunStatus) -> int:
    for text in found.damage:
        show_error(visible(f"damaged: {text}"))
    return Damaged.exit_code if found.damage else OK


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
        refuse_dry_run(root, read_plan_data(root))
        found = pipeline.read_status(root)
        if as_json:
            print_json(found)
        else:
            width = max((len(row.key) for row in found.runs), default=0)
            for row in found.runs:
                click.echo(visible(f"{row.key:{width}}  {row.state}"))
        return _show_damage(found)
    if as_json:
        raise BadInput("--json: lists the points; a log is text: leave --json out, or POINT")
    for line in tail_lines(control.find_log(root, point, attempt, stderr=stderr), lines, follow=follow):
        click.echo(line)
    return OK


_LONGEST_WHY = 300


class State(StrEnum):
    """OPEN: it has not ended, and no process holds it: `mbridge resume` goes on."""

    RUNNING = "running"
    OPEN = "open"
    DONE = "done"
    DRY_RUN = "dry run"
    DAMAGED = "damaged"


_STYLES = {State.RUNNING: "cyan", State.OPEN: "yellow", State.DONE: "green", State.DAMAGED: "bold red"}


@dataclass(frozen=True, order=True)
class Best:
    """The fastest point (test_id/label) of a run with one test, and its step: the mean over its successful runs."""

    step_time_s: float
    point: str


@dataclass(frozen=True)
class ListedRun:
    """A run. counts: its points' runs by verdict, or by state if they have none. why: what is damaged.

    as_of: the time of the states of a run that has not ended, UTC. size_bytes: of its files, with --size.
    """

    name: str
    path: str
    started_at: str
    state: State
    held_by: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    best: Best | None = None
    why: str = ""
    as_of: datetime | None = None
    size_bytes: int | None = None


RUNS = json_object("Runs", "The newest runs, newest first.", runs=list[ListedRun])


@click.command()
@click.option("--output-dir", type=PATH, help="List only the runs in this directory.")
@JSON
@click.option("--size", "with_size", is_flag=True, help="Also sum up the sizes of each run's files.")
@click.option("-n", "most", type=click.IntRange(min=1), default=20, show_default=True, help="Runs to list.")
def runs(output_dir: Path | None, as_json: bool, with_size: bool, most: int) -> int:
    """List runs, newest first: those in ./results and $MBRIDGE_RESULTS, and yours in other directories.

    Slurm is not asked: states of open runs are those that mbridge last saw. `mbridge status RUN` asks.
    """
    found = find_runs(output_dir)
    rows = [read_row(root) for root in found[:most]]
    if with_size:
        rows = [replace(row, size_bytes=_size_of(Path(row.path))) for row in rows]
    if as_json:
        print_json({"runs": rows}, RUNS)
        return OK
    console = new_console()
    if rows:
        console.print(_table(rows))
    if len(found) > most:
        console.print_line(f"{counted(len(found) - most, 'older run')} not shown; -n {len(found)} lists all")
    elif not rows:
        console.print_line("no runs")
    return OK


def read_row(root: Path) -> ListedRun:
    """Return the state of a run; an unreadable run is damaged."""
    started = started_at(root)[0].isoformat(sep=" ", timespec="seconds")
    try:
        return _row(root, started)
    except OSError as error:
        why = f"{error.filename or root}: {error.strerror or error}"
    except (MBridgeError, sqlite3.Error) as error:
        why = str(error)
    return ListedRun(root.name, str(root), started, State.DAMAGED, why=_below(root, why))


def _below(root: Path, text: str) -> str:
    """Return a message without the path of its run."""
    return text.removeprefix(f"{root}: ").removeprefix(f"{root}/")


def _row(root: Path, started: str) -> ListedRun:
    from cloudai_mbridge.report.ranking import rank  # slow to import, and not needed for `status` and `logs`
    from cloudai_mbridge.report.read import read_report

    status = control.read_status(root)
    row = ListedRun(root.name, str(root), started, State.DONE, status.held_by, _sorted(status.counts))
    if status.is_dry_run:
        return ListedRun(root.name, str(root), started, State.DRY_RUN)
    if status.damage:
        return replace(row, state=State.DAMAGED, why=_below(root, status.damage[0]))
    if status.held_by or status.is_open:
        return replace(row, state=State.RUNNING if status.held_by else State.OPEN, as_of=status.as_of)
    if not (file := root / ROOT_FILES.report).is_file():
        return row
    report, _ = read_report(file)
    ran = [point for point in report.points if point.verdict is not Verdict.REJECTED and not point.is_pre_test]
    verdicts = Counter(str(point.verdict) for point in ran)
    timed = tuple(point for point in report.points if point.metrics and point.metrics.step_time_s)
    rankings = rank(replace(report, points=timed))
    best = rankings[0].points[0] if len(rankings) == 1 else None
    if best is not None and best.step_time_s is not None:
        row = replace(row, best=Best(best.step_time_s.capped_mean, f"{best.test_id}/{best.label}"))
    return replace(row, counts=_sorted(verdicts)) if verdicts else row


def _size_of(root: Path) -> int:
    """Return the bytes on the disk of a run's files; links are not followed, and files that vanish count nothing."""
    total = 0
    for place, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts in the order of the verdicts; job states without a verdict in alphabetical order."""
    order = list(map(str, Verdict))
    return dict(sorted(counts.items(), key=lambda item: (order.index(item[0]) if item[0] in order else 99, item[0])))


def _table(rows: Sequence[ListedRun]) -> Table:
    table = Table("started (UTC)", "state", Column("run", overflow="fold"), box=None, pad_edge=False)
    for row in rows:
        counts = ", ".join(f"{count} {name}" for name, count in row.counts.items())
        held = f"held by {row.held_by}" if row.held_by else ""
        best = f"best: {row.best.point}, {row.best.step_time_s:.4g} s" if row.best else ""
        as_of = Observed(at=row.as_of).as_of
        size = "" if row.size_bytes is None else f"{row.size_bytes / 2**20:.1f} MiB"
        details = "; ".join(filter(None, (counts, best, held, as_of, size, clipped(row.why, _LONGEST_WHY))))
        name = Text(visible(f"{row.name}\n{details}".rstrip()))
        table.add_row(row.started_at[:16], Text(row.state, style=_STYLES.get(row.state, "")), name)
    return table
