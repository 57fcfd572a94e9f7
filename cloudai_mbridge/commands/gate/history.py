"""`mbridge history`: import results, and analyze runs over time."""

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.commands.console import SteadyConsole, new_console, print_json
from cloudai_mbridge.commands.options import JSON, Number, completing, run_argument
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.files.documents import json_object
from cloudai_mbridge.gate.history import DEFAULT_METRIC, History, Imported
from cloudai_mbridge.gate.history_file import FAILED, StoredPoint, StoredRun
from cloudai_mbridge.gate.runs import METRICS, without_dry_runs
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.models.toml_source import suggest

CHANGED = 10  # same as for a regression found by a gate
DEFAULT_HISTORY = Path("results/history.sqlite")
HISTORY_VARIABLE = "MBRIDGE_HISTORY"
_MAX_NAMED = 5
_WIDTH = 160  # of a table if the output is not a terminal
_STYLES = {"worse": "bold red", "better": "green", "changed": "yellow"}

_HISTORY = click.option(
    "--history",
    "path",
    type=click.Path(path_type=Path),
    default=DEFAULT_HISTORY,
    show_default=True,
    envvar=HISTORY_VARIABLE,
    show_envvar=True,
    help="The history's file.",
)


_IMPORTED_REPORT = json_object("ImportedReport", "A report, and what became of its runs.", path=Path, runs=Imported)
IMPORTED_REPORTS = json_object(
    "ImportedReports",
    "Imported runs. A report that cannot be imported has an error instead; the others are imported all the same.",
    reports=[_IMPORTED_REPORT],
)
STORED_POINTS = json_object(
    "StoredPoints", "The points of a history, one per comparability key.", points=list[StoredPoint]
)
STORED_RUNS = json_object(
    "StoredRuns",
    "Runs of a history. comparability: key -> what must be equal for results to be compared.",
    runs=list[StoredRun],
    comparability=Mapping[str, Mapping[str, Any]],
)


@click.group()
def history() -> None:
    """Keep the results of all runs, and see where their level moved."""


@history.command("import")
@_HISTORY
@run_argument("results", "RUN...", nargs=-1, required=True)
@JSON
def import_(path: Path, results: tuple[Path, ...], as_json: bool) -> int:
    """Add the results of runs; a RUN may be its report.json. What is there already stays once."""
    console, errors, reports = new_console(_WIDTH, stderr=as_json), list[BadInput](), list[dict[str, Any]]()
    given, skipped = without_dry_runs(results)
    for note in skipped:
        console.print_line(printable(f"note: {note}"))
    with History(path) as store:
        for result in given:
            try:
                imported = store.import_report(result)
            except BadInput as error:
                errors.append(error)
                continue
            reports.append({"path": result, "runs": imported})
            text = f"{counted(imported.added, 'run')} added, {imported.known} already there"
            if imported.rejudged:
                text += f", {imported.rejudged} known as good and failed from now on"
            if imported.left_out:
                text += ", left out: " + ", ".join(f"{number} {why}" for why, number in imported.left_out.items())
            console.print_line(printable(f"{result}: {text}"))
    if errors:
        kind = type(errors[0]) if len({type(error) for error in errors}) == 1 else BadInput
        raise kind("\n".join(dict.fromkeys(printable(str(error)) for error in errors)))
    if as_json:
        print_json({"reports": reports}, IMPORTED_REPORTS)
    return OK


@history.command("list")
@_HISTORY
@click.option("--point", "pattern", default="*", metavar="GLOB", help="Only points of this name, e.g. 'qwen/*'.")
@JSON
def list_(path: Path, pattern: str, as_json: bool) -> int:
    """List the points with their numbers of runs. A point has a line per comparability key."""
    with History(path) as store:
        rows = [row for row in store.points() if fnmatch.fnmatchcase(row.point, pattern)]
    if not rows:
        raise BadInput(f"--point: {printable(pattern)!r} matches no point in {path}; see `mbridge history list`")
    if as_json:
        print_json({"points": rows}, STORED_POINTS)
        return OK
    table = _table("point", "key", "good", "failed", "last run (UTC)", f"last {DEFAULT_METRIC}")
    for row in rows:
        counts = (str(row.num_good), str(row.num_failed))
        _add(table, row.point, row.comparability_id, *counts, _minute(row.last_ended_at), _number(row.last_value))
    new_console(_WIDTH).print(table)
    return OK


@history.command()
@_HISTORY
@click.argument("name", metavar="RUN_ID|POINT")
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="Runs of a point to list.")
@JSON
def show(path: Path, name: str, last: int, as_json: bool) -> int:
    """Show one run, by its id or the start of it, or the last runs of a point."""
    console = new_console(_WIDTH)
    with History(path) as store:
        runs = store.runs(point=name, last=last)
        found = [] if runs else store.runs(run_id_prefix=name, last=_MAX_NAMED + 1)
        if as_json and (runs or len(found) == 1):
            keys = dict.fromkeys(run.comparability_id for run in (*runs, *found))
            comparability = {key: store.fields(key) for key in keys}
            print_json({"runs": [*runs, *found], "comparability": comparability}, STORED_RUNS)
            return OK
        if runs:
            table = _table("run", "ended (UTC)", "verdict", "key", "commit", "nodes", DEFAULT_METRIC, "why")
            for run in runs:
                number = _number(next(iter(run.values.get(DEFAULT_METRIC, ())), None))
                work = (run.verdict, run.comparability_id, (run.commit or "")[:12], ",".join(run.nodes))
                _add(table, run.run_id[:10], _minute(run.ended_at), *work, number, "\n".join(run.reasons))
            console.print(table)
            return OK
        if len(found) == 1:
            _show_run(console, found[0], store)
            return OK
        names = [point for points in store.keys().values() for point in points]
    if found:
        ids = ", ".join(run.run_id for run in found[:_MAX_NAMED])
        raise BadInput(f"{name!r} is the start of several run ids: {ids}{', ...' if len(found) > _MAX_NAMED else ''}")
    known = sorted(set(names))
    remedy = suggest(name, known) if len(known) <= 2 * _MAX_NAMED else "see `mbridge history list`"
    raise BadInput(printable(f"{name!r} is neither a point nor the start of a run id in {path}; {remedy}"))


@history.command()
@_HISTORY
@click.argument("pattern", metavar="[POINT GLOB]", default="*")
@click.option(
    "--metric",
    default=DEFAULT_METRIC,
    show_default=True,
    shell_complete=completing(lambda: METRICS),
    help=f"One of {', '.join(METRICS)}.",
)
@click.option("--last", type=click.IntRange(min=1), default=1000, show_default=True, help="Good runs to look at.")
@click.option(
    "--min-effect",
    type=Number(min=0, max=1, max_open=True),
    default=0.01,
    show_default=True,
    help="The smallest relative change that is named.",
)
@click.option(
    "--assumed-noise",
    type=Number(min=0, min_open=True, max=1),
    help="Relative standard deviation from run to run, for series that are too short to show theirs; e.g. 0.01.",
)
@JSON
@click.option(
    "--fail-on-change", is_flag=True, help=f"Exit with {CHANGED} if any change is named, for better or worse."
)
def trend(path: Path, pattern: str, metric: str, last: int, as_json: bool, fail_on_change: bool, **options: Any) -> int:
    """Find the runs at which the level of a metric moved, by how much, what was new in them, and whether it drifts."""
    if metric not in METRICS:
        raise BadInput(f"--metric: {printable(metric)!r} is unknown; {suggest(metric, list(METRICS))}")
    with History(path) as store:
        keys = {key: points for key, points in store.keys().items() if fnmatch.filter(points, pattern)}
        if not keys:
            raise BadInput(f"{printable(pattern)!r} matches no point in {path}; see `mbridge history list`")
        # numpy, for this command only
        from cloudai_mbridge.gate.trend import TRENDS, find_trend, headline, story, summary

        found = [find_trend(store.series(key, metric, last), points, **options) for key, points in keys.items()]
    if as_json:
        print_json({"trends": found}, TRENDS)
    else:
        console = new_console(_WIDTH)
        for each in found:
            console.print_line(printable(headline(each)), "bold" if each.is_changed else "")
            for text, effect in story(each):
                console.print_line(printable(f"  {text}"), "" if effect is None else _STYLES[effect])
        console.print_line(printable(summary(found)))
    return CHANGED if fail_on_change and any(each.is_changed for each in found) else OK


def _show_run(console: SteadyConsole, run: StoredRun, store: History) -> None:
    facts: list[tuple[str, str]] = [
        ("run", run.run_id),
        ("point", run.point),
        ("scenario", f"{run.scenario} on {run.system}"),
        ("verdict", run.verdict),
        *(("why", reason) for reason in run.reasons),
        ("ended", run.ended_at),
        ("nodes", ", ".join(run.nodes) or "unknown"),
        ("commit", run.commit or "unknown"),
        ("steps", f"{run.num_steps or '?'}, of which {run.warmup_steps} warm-up"),
        ("FLOPs", f"{run.flops_formula or 'unknown'}, {_number(run.flops_per_step) or 'unknown'} per step"),
    ]
    for name, values in run.values.items():
        unit = METRICS[name].unit if name in METRICS else ""
        facts.append((name, f"{', '.join(map(_number, values))} {unit}".rstrip()))
    key = run.comparability_id
    for title, fields in (("environment", run.environment), (f"comparability {key}", store.fields(key))):
        facts += [(f"{title}: {name}", json.dumps(each)) for name, each in sorted(fields.items()) if each is not None]
    for name, text in facts:
        console.print_line(printable(f"{name}: {text}"), "bold red" if (name, text) == ("verdict", FAILED) else "")


def _table(*columns: str) -> Table:
    return Table(*(Column(column, overflow="fold") for column in columns))


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text("\n".join(printable(line) for line in cell.split("\n"))) for cell in cells))


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
