"""Run a plan, show its progress, and report: for the commands that submit."""

import sqlite3
import sys
from pathlib import Path

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole, show_error, show_rejected
from cloudai_mbridge.commands.run.screen import observer_for
from cloudai_mbridge.completion import completion
from cloudai_mbridge.errors import OK, POINTS_FAILED, BadInput, MBridgeError
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.report import RunReport
from cloudai_mbridge.report.formats.terminal import render_ending
from cloudai_mbridge.report.write import FindHistory
from cloudai_mbridge.runner.interrupt import Detached, Interrupts
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.tune import choosers_for
from cloudai_mbridge.verdict import Verdict


def write(console: SteadyConsole, prepared: pipeline.Prepared, *, all_rejected: bool = False) -> Path:
    """Write a plan into a new directory, once the system would accept it; return the directory."""
    show_rejected(console, prepared.plan, in_full=all_rejected)
    pipeline.preflight(prepared)
    for line in pipeline.check_limits(prepared):
        console.print_line(line)
    root = pipeline.write(prepared)
    console.print_line(f"results: {root}")
    return root


def refuse_detaching(system: System) -> None:
    """Raise BadInput of a system without a scheduler that keeps the jobs."""
    if system.is_one_machine:
        raise BadInput(
            f"--detach: system {system.name!r} has no scheduler: mbridge itself starts one run after the other;"
            " leave --detach out, and start mbridge in tmux or with nohup"
        )


def drive(console: SteadyConsole, prepared: pipeline.Prepared, root: Path, *, detach: bool = False) -> int:
    """Drive a written plan to its end and report, also on failure; raise InUse if another process holds it.

    detach: end once everything possible is submitted, without a report.
    """
    may_detach = not prepared.system.is_one_machine
    try:
        with completion(prepared.plan, root, console.print_line) as ended, driver_lock(root):
            try:
                with observer_for(console, prepared.plan, root) as observer:
                    ask = observer.notice if sys.stdin.isatty() and sys.stdout.isatty() else None
                    interrupts = Interrupts(ask, may_detach=may_detach, detaches=detach)
                    choosers = choosers_for(pipeline.with_defaults(prepared), root)
                    pipeline.execute(prepared, root, observer, choosers=choosers, interrupts=interrupts)
            except Detached:
                raise
            except MBridgeError:
                ended.report = _report_after_error(console, root)
                raise
            ended.report = show_report(console, root)
    except Detached as detached:
        console.print_line(str(detached))
        return OK
    return OK if ended.report.succeeded else POINTS_FAILED


def _report_after_error(console: SteadyConsole, root: Path) -> RunReport | None:
    try:
        report = show_report(console, root)
    except (MBridgeError, OSError, sqlite3.Error) as error:  # the first error is more informative
        show_error(f"no report: {error}")
        return None
    if report.count(Verdict.CANCELLED):
        console.print_line(f"continue with: mbridge resume {root}")
    return report


def show_report(console: SteadyConsole, root: Path, **options: FindHistory) -> RunReport:
    """Write the reports of a run and show them; `options` as in `pipeline.report`."""
    report = pipeline.report(root, **options)
    console.print(render_ending(report, console.width), crop=False)
    console.print_line(f"report: {root / ROOT_FILES.report_html}")
    console.print_line(f"every point: mbridge show {root}")
    return report
