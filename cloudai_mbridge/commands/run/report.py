"""`mbridge generate-report`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.options import PATH
from cloudai_mbridge.commands.run.drive import show_report
from cloudai_mbridge.commands.run_names import RUN_TEXT, as_run
from cloudai_mbridge.errors import OK, POINTS_FAILED
from cloudai_mbridge.gate.history.store import History
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.lock import no_driver


@click.command("generate-report")
@click.option("--result-dir", type=as_run, metavar="RUN", required=True, help=RUN_TEXT)
@click.option("--history", "history_file", type=PATH, help="Show the points' earlier runs in report.html.")
@click.option("--system-config", type=PATH, help="Accepted as in CloudAI; the directory knows its system.")
@click.option("--tests-dir", type=PATH, help="Accepted as in CloudAI; the directory knows its tests.")
@click.option("--test-scenario", type=PATH, help="Accepted as in CloudAI; the directory knows its scenario.")
@click.option("--hook-dir", type=PATH, help="Accepted as in CloudAI; the directory knows its hooks.")
def generate_report(result_dir: Path, history_file: Path | None, **_: Path | None) -> int:
    """Judge a run's directory again and rewrite its reports."""
    refuse_dry_run(result_dir, read_plan_data(result_dir))
    control.require_writable_run(result_dir)
    options = {"find_history": partial(_history_rows, history_file)} if history_file else {}
    with no_driver(result_dir):
        return OK if show_report(new_console(), result_dir, **options).succeeded else POINTS_FAILED


def _history_rows(path: Path, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    from cloudai_mbridge.gate.trend.words import history_rows  # numpy, for this command only

    with History(path) as store:
        return history_rows(store, report)
