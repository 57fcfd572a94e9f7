"""`mbridge show`, `generate-report` and `export`: the results of a run."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import new_console, print_json
from cloudai_mbridge.commands.options import JSON, PATH, REJECTED, RUN_TEXT, as_run, run_argument
from cloudai_mbridge.commands.run.drive import show_report, show_results
from cloudai_mbridge.errors import OK, POINTS_FAILED, BadInput, Paused, counted
from cloudai_mbridge.export import targets
from cloudai_mbridge.files.documents import fill, json_object
from cloudai_mbridge.files.replace import replacing, require_writable
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.report import build_report
from cloudai_mbridge.report.model import PointReport
from cloudai_mbridge.report.terminal import render_table
from cloudai_mbridge.report.text import render_details
from cloudai_mbridge.runner import control
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
    with pipeline.observing(root) as observed:
        report = build_report(root, observed)
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


_FILES = (
    *(ROOT_FILES.report, ROOT_FILES.summary, ROOT_FILES.report_html, ROOT_FILES.markdown, ROOT_FILES.junit),
    *(ROOT_FILES.steps_csv, ROOT_FILES.steps_parquet),
)


REPORT_WRITTEN = json_object(
    "ReportWritten",
    """The reports of a run. succeeded: as the exit code says. counts: points by verdict. num_rejected: by rules.

    files: none before the run has ended.
    """,
    path=Path,
    succeeded=bool,
    counts=Mapping[str, int],
    num_rejected=int,
    files=list[Path],
)


@click.command("generate-report")
@click.option("--result-dir", type=as_run, metavar="RUN", required=True, help=RUN_TEXT)
@click.option("--history", "history_file", type=PATH, help="Show the points' earlier runs in report.html.")
@click.option("--system-config", type=PATH, help="Accepted as in CloudAI; the directory knows its system.")
@click.option("--tests-dir", type=PATH, help="Accepted as in CloudAI; the directory knows its tests.")
@click.option("--test-scenario", type=PATH, help="Accepted as in CloudAI; the directory knows its scenario.")
@click.option("--hook-dir", type=PATH, help="Accepted as in CloudAI; the directory knows its hooks.")
@JSON
def generate_report(result_dir: Path, history_file: Path | None, as_json: bool, **_: Path | None) -> int:
    """Judge a run's directory again and rewrite its reports; show the results so far of a run that has not ended."""
    refuse_dry_run(result_dir, read_plan_data(result_dir))
    control.require_writable_run(result_dir)
    options = {"find_history": partial(_history_rows, history_file)} if history_file else {}
    console = new_console(stderr=as_json)
    with pipeline.observing(result_dir) as observed:
        if observed.held_by:
            report = build_report(result_dir, observed)
            show_results(console, report, result_dir, is_written=False)
        else:
            report = show_report(console, result_dir, observed, **options)
    is_written = not report.is_unfinished and not observed.held_by
    if as_json:
        names = _FILES if is_written else ()
        files = [result_dir / name for name in names if (result_dir / name).exists()]
        succeeded = report.succeeded and is_written
        print_json(fill(REPORT_WRITTEN, report, path=result_dir, succeeded=succeeded, files=files), REPORT_WRITTEN)
    if is_written:
        return OK if report.succeeded else POINTS_FAILED
    return POINTS_FAILED if report.has_failed else Paused.exit_code


def _history_rows(path: Path, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    from cloudai_mbridge.gate.history import History
    from cloudai_mbridge.gate.trend import history_rows  # numpy, only for this option

    with History(path) as store:
        return history_rows(store, report)


@click.command()
@run_argument("root")
@click.option("--to", "target", type=click.Choice(targets.names()), required=True, help="Where results go.")
@click.option("--output", "-o", type=PATH, help="File to write, for csv, parquet and prometheus; default: stdout.")
@click.option(
    "--by", type=click.Choice(["run", "point"]), default="run", show_default=True, help="A row for each run or point."
)
def export(root: Path, target: str, output: Path | None, by: str) -> int:
    """Export the results of a run: a row for each run of a point.

    mlflow, wandb and otel read addresses and keys from their own environment variables.
    """
    from cloudai_mbridge.export.table import read_table  # slow to import, and only for this command

    exporter = targets.find(target)
    is_service = hasattr(exporter, "send")
    if is_service and output is not None:
        raise BadInput(f"--output {output}: {target} writes no file; leave --output out")
    if getattr(exporter, "IS_BINARY", False) and output is None:
        raise BadInput(f"--to {target}: needs a file; add --output FILE")
    if output is not None:
        require_writable(output)
    table = read_table(root, by_point=by == "point")
    if table.so_far:
        click.echo(f"note: {visible(table.so_far)}", err=True)
    if is_service:
        if sys.stderr.isatty():  # a server that does not answer takes a while
            click.echo(f"sending {counted(len(table.ran), 'run')} to {target}", err=True)
        click.echo(visible(exporter.send(table)))
        return OK
    content = exporter.render(table)
    if output is None:
        click.echo(content, nl=False)
        return OK
    with replacing(output) as unfinished:
        unfinished.write_bytes(content)
    click.echo(visible(f"written: {output} ({counted(len(table.rows), 'row')})"))
    return OK
