"""Commands that submit: `mbridge run`, `resume` and `cancel`."""

import sqlite3
import sys
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole, new_console, show_error, show_rejected
from cloudai_mbridge.commands.options import DETACH, REJECTED, RUN_ROOT, request_of, scenario_options
from cloudai_mbridge.commands.run.watch import observer_for
from cloudai_mbridge.completion import completion
from cloudai_mbridge.errors import OK, POINTS_FAILED, BadInput, MBridgeError
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.report import RunReport
from cloudai_mbridge.report.terminal import render_ending
from cloudai_mbridge.report.write import FindHistory
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.interrupt import Detached, Interrupted, Interrupts
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
        with completion(prepared.plan, root, console.print_line) as take_report, driver_lock(root):
            try:
                with observer_for(console, prepared.plan, root) as observer:
                    ask = observer.notice if sys.stdin.isatty() and sys.stdout.isatty() else None
                    interrupts = Interrupts(ask, may_detach=may_detach, detaches=detach)
                    choosers = choosers_for(pipeline.with_defaults(prepared), root)
                    pipeline.execute(prepared, root, observer, choosers=choosers, interrupts=interrupts)
            except Detached:
                raise
            except MBridgeError:
                try:
                    report = show_report(console, root)
                except (MBridgeError, OSError, sqlite3.Error) as error:  # the first error is more informative
                    show_error(f"no report: {error}")
                else:
                    take_report(report)
                    if report.count(Verdict.CANCELLED):
                        console.print_line(f"continue with: mbridge resume {root}")
                raise
            report = show_report(console, root)
            take_report(report)
    except Detached as detached:
        console.print_line(str(detached))
        return OK
    return OK if report.succeeded else POINTS_FAILED


def show_report(console: SteadyConsole, root: Path, **options: FindHistory) -> RunReport:
    """Write the reports of a run and show them; `options` as in `pipeline.report`."""
    report = pipeline.report(root, **options)
    console.print(render_ending(report, console.width), crop=False)
    console.print_line(f"report: {root / ROOT_FILES.report_html}")
    console.print_line(f"every point: mbridge show {root}")
    return report


@click.command()
@scenario_options(output_dir=True)
@click.option("--max-parallel", type=click.IntRange(min=1), help="Runs active at a time; default: the scenario's.")
@click.option("--fail-fast", is_flag=True, help="Stop everything at the first run that fails.")
@DETACH
@REJECTED
def run(max_parallel: int | None, fail_fast: bool, detach: bool, all_rejected: bool, **options: Any) -> int:
    """Check, submit, watch and report all points of a scenario."""
    console = new_console()
    overrides = {"max_parallel": max_parallel, "fail_fast": fail_fast or None}
    prepared = pipeline.plan(request_of(options), {k: v for k, v in overrides.items() if v is not None})
    if detach:
        refuse_detaching(prepared.system)
    if not prepared.plan.runs:
        show_rejected(console, prepared.plan, in_full=all_rejected)
        console.print_line("every point is rejected: nothing was submitted or written")
        return POINTS_FAILED
    return drive(console, prepared, write(console, prepared, all_rejected=all_rejected), detach=detach)


_LOST_HOST = click.option(
    "--lost-host",
    "lost_hosts",
    multiple=True,
    metavar="NAME",
    help="A machine that is gone for good: mbridge's processes there count as killed.",
)


@click.command()
@RUN_ROOT
@_LOST_HOST
@DETACH
def resume(root: Path, lost_hosts: tuple[str, ...], detach: bool) -> int:
    """Continue a run whose mbridge process ended before its jobs did. Nothing is submitted twice."""
    control.require_resumable(root, lost_hosts)
    prepared = pipeline.read(root)
    if detach:
        refuse_detaching(prepared.system)
    pipeline.preflight(prepared)
    return drive(new_console(), prepared, root, detach=detach)


@click.command()
@RUN_ROOT
@_LOST_HOST
def cancel(root: Path, lost_hosts: tuple[str, ...]) -> int:
    """Cancel everything that a run has submitted, wait until it has ended, and report."""
    console = new_console()
    refuse_dry_run(root, read_plan_data(root))
    control.cancel_run(root)
    control.require_resumable(root, lost_hosts)
    prepared = pipeline.read(root, needs_secrets=False)
    with driver_lock(root):
        try:  # also if a driver already did it: the run may have ended for another reason
            with observer_for(console, prepared.plan, root) as observer:
                pipeline.execute(prepared, root, observer, only_cancel=True)
        except Interrupted as done:
            if done.left_running:
                raise
        show_report(console, root)
    return OK
