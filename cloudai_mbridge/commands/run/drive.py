"""Commands that submit: `mbridge run`, `resume` and `cancel`."""

import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole, new_console, show_error, show_rejected
from cloudai_mbridge.commands.options import (
    DETACH,
    NEAR_RUN_ROOT,
    REJECTED,
    RUN_ROOT,
    rehearse_options,
    request_of,
    scenario_options,
)
from cloudai_mbridge.commands.plan.rehearse import rehearse_into
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
from cloudai_mbridge.runner.interrupt import Detached, Interrupted, InterruptedOutside, Interrupts
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.runner.observe import Observed
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


_MOST_AT_ONCE = 500  # runs whose report takes a second or two


def drive(
    console: SteadyConsole, prepared: pipeline.Prepared, root: Path, *, detach: bool = False, is_throttled: bool = False
) -> int:
    """Drive a written plan to its end and report, also on failure; raise InUse if another process holds it.

    detach: end once everything possible is submitted, without a report. is_throttled: as in `run_all`.
    """
    may_detach, is_over = not prepared.system.is_one_machine, False
    try:
        with completion(prepared.plan, root, console.print_line) as take_report, driver_lock(root):
            try:
                with observer_for(console, prepared.plan, root) as observer:
                    ask = observer.notice if sys.stdin.isatty() and sys.stdout.isatty() else None
                    interrupts = Interrupts(ask, may_detach=may_detach, detaches=detach)
                    choosers = choosers_for(pipeline.with_defaults(prepared), root)
                    pipeline.execute(
                        prepared, root, observer, choosers=choosers, interrupts=interrupts, is_throttled=is_throttled
                    )
            except Detached:
                raise
            except MBridgeError as error:
                is_over = True
                if isinstance(error, Interrupted) and error.left_running and len(prepared.plan.runs) > _MOST_AT_ONCE:
                    show_error(f"no report: {_write_it(root)}")  # who does not wait for jobs does not wait for this
                    raise
                try:
                    report = show_report(console, root)
                except KeyboardInterrupt:
                    show_error(f"no report: interrupted; {_write_it(root)}")
                except (MBridgeError, OSError, sqlite3.Error) as other:  # the first error is more informative
                    show_error(f"no report: {other}")
                else:
                    take_report(report)
                    if report.count(Verdict.CANCELLED):
                        console.print_line(f"continue with: mbridge resume {root}")
                raise
            is_over = True
            report = show_report(console, root)
            take_report(report)
    except KeyboardInterrupt:
        outside = f"nothing was submitted; continue with: mbridge resume {root}"
        raise InterruptedOutside(f"interrupted by SIGINT; {_write_it(root) if is_over else outside}") from None
    except Detached as detached:
        console.print_line(str(detached))
        return OK
    return OK if report.succeeded else POINTS_FAILED


def _write_it(root: Path) -> str:
    return f"write the report with: mbridge generate-report --result-dir {root}"


def show_report(
    console: SteadyConsole, root: Path, observed: Observed | None = None, **options: FindHistory
) -> RunReport:
    """Write the reports of a run and show them; observed, options: as in `pipeline.report`."""
    report = pipeline.report(root, observed, **options)
    show_results(console, report, root, is_written=not report.is_unfinished)
    return report


def show_results(console: SteadyConsole, report: RunReport, root: Path, *, is_written: bool) -> None:
    """Show the results of a run, and where they are written."""
    console.print(render_ending(report, console.width), crop=False)
    if not is_written:
        console.print_line("no report is written before the run has ended")
        return
    console.print_line(f"report: {root / ROOT_FILES.report_html}")
    console.print_line(f"every point: mbridge show {root}")


@click.command()
@scenario_options(output_dir=True)
@click.option("--max-parallel", type=click.IntRange(min=1), help="Runs active at a time; default: the scenario's.")
@click.option("--fail-fast", is_flag=True, help="Stop everything at the first run that fails.")
@DETACH
@REJECTED
@rehearse_options
def run(
    max_parallel: int | None,
    fail_fast: bool,
    detach: bool,
    all_rejected: bool,
    rehearse: str | None,
    on_slurm: bool,
    **options: Any,
) -> int:
    """Check, submit, watch and report all points of a scenario."""
    console = new_console()
    overrides = {"max_parallel": max_parallel, "fail_fast": fail_fast or None}
    prepared = pipeline.plan(request_of(options), {k: v for k, v in overrides.items() if v is not None})
    if detach:
        refuse_detaching(prepared.system)
    if rehearse and prepared.plan.runs:
        pipeline.preflight(prepared)
        prepared = rehearse_into(console, prepared, rehearse, on_slurm=on_slurm)
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
@click.option("--max-parallel", type=click.IntRange(min=1), help="Runs active at a time; default: the scenario's.")
@DETACH
def resume(root: Path, lost_hosts: tuple[str, ...], max_parallel: int | None, detach: bool) -> int:
    """Continue a run whose mbridge process ended before its jobs did. Nothing is submitted twice."""
    control.require_resumable(root, lost_hosts)
    prepared = pipeline.read(root)
    if max_parallel is not None:
        config = prepared.plan.runner.model_copy(update={"max_parallel": max_parallel})
        prepared = replace(prepared, plan=replace(prepared.plan, runner=config))
    if detach:
        refuse_detaching(prepared.system)
    pipeline.preflight(prepared)
    return drive(new_console(), prepared, root, detach=detach, is_throttled=max_parallel is not None)


@click.command()
@NEAR_RUN_ROOT
@_LOST_HOST
def cancel(root: Path, lost_hosts: tuple[str, ...]) -> int:
    """Cancel everything that a run has submitted, wait until it has ended, and report.

    `latest` is refused for a run outside ./results and $MBRIDGE_RESULTS.
    """
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
