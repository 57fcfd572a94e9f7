"""`mbridge watch`: observe a run from anywhere while another process drives it."""

import time
from collections.abc import Mapping
from pathlib import Path

import click

from cloudai_mbridge.commands.console import new_console
from cloudai_mbridge.commands.run.screen import Screen, observer_for
from cloudai_mbridge.commands.run_names import run_argument
from cloudai_mbridge.errors import OK, counted
from cloudai_mbridge.plan import ROOT_FILES, ScenarioPlan
from cloudai_mbridge.plan.read import read_plan, read_plan_data, refuse_dry_run
from cloudai_mbridge.report.build import build_report
from cloudai_mbridge.report.formats.terminal import render_ending
from cloudai_mbridge.runner.clock import RunClock
from cloudai_mbridge.runner.control import read_entries
from cloudai_mbridge.runner.journal.rows import JournalEntry
from cloudai_mbridge.runner.lines import PlainObserver
from cloudai_mbridge.runner.lock import has_driver, no_driver

_LOOK_S = 1.0


@click.command()
@run_argument("root")
def watch(root: Path) -> int:
    """Watch a run, whichever process drives it, until it has ended. Ctrl-C ends the watching, not the run."""
    refuse_dry_run(root, read_plan_data(root))
    console, plan = new_console(), read_plan(root, needs_secrets=False)
    try:
        with observer_for(console, plan, root) as observer:
            if isinstance(observer, PlainObserver):
                observer.tick()
            while has_driver(root):
                time.sleep(_LOOK_S)
                _tell(observer, plan, read_entries(root))
    except KeyboardInterrupt:
        console.print_line(f"the run goes on; watch it again with: mbridge watch {root}")
        return OK
    entries = read_entries(root)
    if num_open := sum(run.key not in entries or entries[run.key].verdict is None for run in plan.runs):
        left = f"{counted(num_open, 'run')} {'have' if num_open > 1 else 'has'} not ended"
        console.print_line(f"{left}, and no running process holds this run; continue with: mbridge resume {root}")
        return OK
    with no_driver(root):
        console.print(render_ending(build_report(root), console.width), crop=False)
    console.print_line(f"report: {root / ROOT_FILES.report_html}")
    return OK


def _tell(observer: PlainObserver | Screen, plan: ScenarioPlan, entries: Mapping[str, JournalEntry]) -> None:
    """Report changes to the observer."""
    was, now = observer.clock, RunClock(plan)
    now.catch_up(entries)
    for old, new in zip(was.rows.values(), now.rows.values(), strict=True):
        if new.status is not None and (old.status is None or old.status.state != new.status.state):
            observer.saw(new.run, new.status, new.since)
        if new.verdict and new.verdict != old.verdict:
            observer.decided(new.run, new.verdict, entries[new.run.key].reasons)
    was.catch_up(entries)
