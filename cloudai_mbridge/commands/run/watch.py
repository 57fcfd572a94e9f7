"""`mbridge watch`: observe a run from anywhere while another process drives it."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from cloudai_mbridge.commands.console import SteadyConsole, new_console
from cloudai_mbridge.commands.options import PATH
from cloudai_mbridge.commands.run.screen import Screen, observer_for
from cloudai_mbridge.commands.run_names import run_argument
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.files.replace import require_writable, write_text
from cloudai_mbridge.plan import ROOT_FILES, ScenarioPlan
from cloudai_mbridge.plan.read import read_plan, read_plan_data, refuse_dry_run
from cloudai_mbridge.report.build import build_report
from cloudai_mbridge.report.formats.terminal import render_ending
from cloudai_mbridge.report.html import log_links, render_html
from cloudai_mbridge.runner.clock import PlainObserver, RunClock
from cloudai_mbridge.runner.control import read_entries
from cloudai_mbridge.runner.journal_file import JournalEntry
from cloudai_mbridge.runner.lock import has_driver, no_driver, reading

_LOOK_S = 1.0
_RELOAD_S = 5  # of the page; a busy machine writes it less often
_COST = 10.0


@click.command()
@run_argument("root")
@click.option("--html", "page", type=PATH, help="Write the report's page again and again, until the run has ended.")
def watch(root: Path, page: Path | None) -> int:
    """Watch a run, whichever process drives it, until it has ended. Ctrl-C ends the watching, not the run."""
    refuse_dry_run(root, read_plan_data(root))
    console, plan = new_console(), read_plan(root, needs_secrets=False)
    if page is None:
        return _watch(console, plan, root, lambda: None)
    if page.resolve().parent == root.resolve() and page.name in vars(type(ROOT_FILES)).values():
        raise BadInput(f"--html: {page} is a file of the run itself; name another file")
    require_writable(page)
    writer = _PageWriter(page, root, plan)
    console.print_line(f"page: {page}")
    try:
        return _watch(console, plan, root, writer.write_if_due)
    finally:
        writer.write(is_last=True)


class _PageWriter:
    """Writes the page of a report during a run, atomically."""

    def __init__(self, page: Path, root: Path, plan: ScenarioPlan) -> None:
        self._page, self._root, self._plan = page, root, plan
        self._due_at = 0.0

    def write_if_due(self) -> None:
        """Write if the last time is long enough ago: a report of many points takes long itself."""
        if (begin := time.monotonic()) < self._due_at:
            return
        self.write()
        self._due_at = max(begin + _RELOAD_S, time.monotonic() + _COST * (time.monotonic() - begin))

    def write(self, *, is_last: bool = False) -> None:
        """Write now. is_last: the page does not load itself again."""
        with reading(self._root) as held_by:
            is_open = _num_open(self._plan, read_entries(self._root)) > 0
            report = build_report(self._root, held_by or ("no process" if is_open else None)).to_dict()
        links = log_links(report, self._root, self._page)
        write_text(self._page, render_html(report, logs=links, reload_s=None if is_last else _RELOAD_S))


def _num_open(plan: ScenarioPlan, entries: Mapping[str, JournalEntry]) -> int:
    return sum(run.key not in entries or entries[run.key].verdict is None for run in plan.runs)


def _watch(console: SteadyConsole, plan: ScenarioPlan, root: Path, look: Callable[[], None]) -> int:
    """Watch until nobody drives the run. look: called at every look."""
    try:
        with observer_for(console, plan, root) as observer:
            if isinstance(observer, PlainObserver):
                observer.tick()
            while has_driver(root):
                look()
                time.sleep(_LOOK_S)
                _tell(observer, plan, read_entries(root))
    except KeyboardInterrupt:
        console.print_line(f"the run goes on; watch it again with: mbridge watch {root}")
        return OK
    if num_open := _num_open(plan, read_entries(root)):
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
