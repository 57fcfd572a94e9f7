"""`mbridge resume` and `mbridge cancel`."""

from pathlib import Path

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.options import DETACH
from cloudai_mbridge.commands.run.drive import drive, refuse_detaching, show_report
from cloudai_mbridge.commands.run.screen import observer_for
from cloudai_mbridge.commands.run_names import RUN_ROOT
from cloudai_mbridge.errors import OK
from cloudai_mbridge.plan.read import read_plan_data, refuse_dry_run
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.interrupt import Interrupted
from cloudai_mbridge.runner.lock import driver_lock

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
