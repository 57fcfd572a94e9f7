"""`mbridge generate-report`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.json_output import print_json
from cloudai_mbridge.commands.options import JSON, PATH
from cloudai_mbridge.commands.run.drive import show_report
from cloudai_mbridge.commands.run_names import RUN_TEXT, as_run
from cloudai_mbridge.errors import OK, POINTS_FAILED
from cloudai_mbridge.gate.history import History
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.report import build_report
from cloudai_mbridge.report.formats.terminal import render_ending
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.lock import reading

_FILES = (
    *(ROOT_FILES.report, ROOT_FILES.summary, ROOT_FILES.report_html, ROOT_FILES.markdown, ROOT_FILES.junit),
    *(ROOT_FILES.steps_csv, ROOT_FILES.steps_parquet),
)


@dataclass(frozen=True)
class ReportWritten:
    """The reports of a run. succeeded: as the exit code says. counts: points by verdict. num_rejected: by rules.

    files: none while another process drives the run.
    """

    path: Path
    succeeded: bool
    counts: Mapping[str, int]
    num_rejected: int
    files: tuple[Path, ...]


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
    with reading(result_dir) as held_by:
        if held_by:
            report = build_report(result_dir, held_by)
            console.print(render_ending(report, console.width), crop=False)
            console.print_line("no report is written before the run has ended")
        else:
            report = show_report(console, result_dir, **options)
    succeeded = report.succeeded and held_by is None
    if as_json:
        names = () if held_by else _FILES
        files = tuple(result_dir / name for name in names if (result_dir / name).exists())
        print_json(ReportWritten(result_dir, succeeded, report.counts, report.num_rejected, files))
    return OK if succeeded else POINTS_FAILED


def _history_rows(path: Path, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    from cloudai_mbridge.gate.trend import history_rows  # numpy, only for this command

    with History(path) as store:
        return history_rows(store, report)
