"""`mbridge runs`: list runs and their states."""

import sqlite3
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean

import click
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.json_output import print_json
from cloudai_mbridge.commands.options import JSON, PATH
from cloudai_mbridge.errors import OK, MBridgeError, counted
from cloudai_mbridge.files.run_files import ROOT_FILES, started_at
from cloudai_mbridge.files.text import clipped, visible
from cloudai_mbridge.gate.results.read import RunResult, read_results
from cloudai_mbridge.gate.results.values import METRICS, Metric
from cloudai_mbridge.plan.read import find_runs
from cloudai_mbridge.report.ranking import is_same_work
from cloudai_mbridge.runner.control import read_status
from cloudai_mbridge.verdict import Verdict

_STEP_TIME, _TOKENS = METRICS["step_time_s"], METRICS["tokens_per_s_per_gpu"]
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
    """A run. counts: its points' runs by verdict, or by state if they have none. why: what is damaged."""

    name: str
    path: str
    started_at: str
    state: State
    held_by: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    best: Best | None = None
    why: str = ""


@dataclass(frozen=True)
class Runs:
    """The newest runs, newest first."""

    runs: tuple[ListedRun, ...]


@click.command()
@click.option("--output-dir", type=PATH, help="List only the runs in this directory.")
@JSON
@click.option("-n", "most", type=click.IntRange(min=1), default=20, show_default=True, help="Runs to list.")
def runs(output_dir: Path | None, as_json: bool, most: int) -> int:
    """List runs, newest first: those in ./results and $MBRIDGE_RESULTS, and yours in other directories."""
    found = find_runs(output_dir)
    rows = [read_row(root) for root in found[:most]]
    if as_json:
        print_json(Runs(tuple(rows)))
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
    status = read_status(root)
    head = (root.name, str(root), started)
    if status.is_dry_run:
        return ListedRun(*head, State.DRY_RUN)
    if status.damage:
        return ListedRun(
            *head, State.DAMAGED, status.driver, _sorted(status.counts), why=_below(root, status.damage[0])
        )
    if status.driver or status.is_open:
        return ListedRun(*head, State.RUNNING if status.driver else State.OPEN, status.driver, _sorted(status.counts))
    report = root / ROOT_FILES.report
    results = read_results(report) if report.is_file() else []
    counts = Counter(result.verdict for result in results) or status.counts
    return ListedRun(*head, State.DONE, None, _sorted(counts), _best(results))


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts in the order of the verdicts; job states without a verdict in alphabetical order."""
    order = list(map(str, Verdict))
    return dict(sorted(counts.items(), key=lambda item: (order.index(item[0]) if item[0] in order else 99, item[0])))


def _best(results: Sequence[RunResult]) -> Best | None:
    good = [run for run in results if run.is_success and _STEP_TIME.of(run)]
    if len({run.point.partition("/")[0] for run in good}) != 1:
        return None
    by_time = is_same_work(map(_tokens_per_step, good)) or not all(map(_TOKENS.of, good))
    points: dict[str, list[RunResult]] = {}
    for run in good:
        points.setdefault(run.point, []).append(run)
    times = {point: _mean(runs, _STEP_TIME) for point, runs in points.items()}
    rates = {} if by_time else {point: -_mean(runs, _TOKENS) for point, runs in points.items()}
    best = min(points, key=lambda point: (rates.get(point, 0.0), times[point], point))
    return Best(times[best], best)


def _tokens_per_step(run: RunResult) -> float | None:
    if not run.world_size or run.world_size > sys.maxsize or not run.tokens_per_step_per_gpu:
        return None
    return run.world_size * run.tokens_per_step_per_gpu


def _mean(runs: Sequence[RunResult], metric: Metric) -> float:
    return fmean(value[0] for run in runs if (value := metric.of(run)))


def _table(rows: Sequence[ListedRun]) -> Table:
    table = Table("started (UTC)", "state", Column("run", overflow="fold"), box=None, pad_edge=False)
    for row in rows:
        name = Text(visible(f"{row.name}\n{_details(row)}".rstrip()))
        table.add_row(row.started_at[:16], Text(row.state, style=_STYLES.get(row.state, "")), name)
    return table


def _details(row: ListedRun) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in row.counts.items())
    held = f"held by {row.held_by}" if row.held_by else ""
    best = f"best: {row.best.point}, {row.best.step_time_s:.4g} s" if row.best else ""
    return "; ".join(filter(None, (counts, best, held, clipped(row.why, _LONGEST_WHY))))
