"""Watch a run: `mbridge watch`, and the progress on a terminal, for the commands that submit, too."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from statistics import median

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.commands.console import SteadyConsole, new_console
from cloudai_mbridge.commands.options import PATH, run_argument
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.files.replace import require_page, write_text
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.plan import ROOT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.read import read_plan, read_plan_data, refuse_dry_run
from cloudai_mbridge.report.build import build_report
from cloudai_mbridge.report.html import log_links, render_html
from cloudai_mbridge.report.terminal import render_ending
from cloudai_mbridge.runner.clock import PlainObserver, RunClock, RunProgress, clock_of, counts_text, time_text
from cloudai_mbridge.runner.control import read_entries
from cloudai_mbridge.runner.journal_file import JournalEntry
from cloudai_mbridge.runner.lock import has_driver, no_driver, reading
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.verdict import Verdict

_STYLE = {JobClass.ACTIVE: "cyan", JobClass.SUCCEEDED: "green", JobClass.CANCELLED: "yellow"}
_AROUND = 6  # lines other than rows: two of the header, the table's head, the line of omitted rows, the cursor's
_NARROW = 60  # columns, for all measures
_JUST_S = 60.0  # time that a successful run stays visible
_REFRESH_S = 1.0


class Screen(AbstractContextManager["Screen"]):
    """A view that fits the terminal, whatever its size, and moves while nothing happens."""

    def __init__(self, console: Console, plan: ScenarioPlan, root: Path, clock: RunClock | None = None) -> None:
        self.clock = clock or RunClock(plan)
        self._console, self._plan = console, plan
        self._progress, self._lock = Progress(root), threading.Lock()
        self._steps: dict[str, StepRecord] = {}
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=1 / _REFRESH_S, transient=True
        )

    def __enter__(self) -> "Screen":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def saw(self, run: RunPlan, status: JobStatus, at: float | None = None) -> None:
        with self._lock:
            self.clock.saw(run, status, at)
            if not status.is_final:
                self._progress.forget(run)
                self._steps.pop(run.key, None)

    def decided(self, run: RunPlan, verdict: str, reasons: tuple[str, ...]) -> None:
        with self._lock:
            self.clock.decided(run, verdict)

    def notice(self, text: str) -> None:
        self._console.print(Text(f"notice: {visible(text)}"))

    def stopping(self) -> None:
        self.clock.is_stopping = True

    def render(self) -> RenderableType:
        with self._lock:
            now, rows = time.time(), [row for row in self.clock.rows.values() if row.is_counted]
            read = {row.run.key: self._read(row) for row in rows if row.group == "running"}
            title = Text(visible(f"{self._plan.scenario} on {self._plan.system}"), style="bold")
            steps = {key: found for key, found in read.items() if found}
            title.append(f"  {time_text(self.clock, now, steps)}", style="not bold")
            most = self._plan.runner.max_gpu_hours
            cost = f"{round(self.clock.gpu_hours(now), 3):.3g}{f' of {most:g}' if most else ''} GPU-hours"
            counts = Text(f"{counts_text(self.clock)}; {cost}")
            shown, left_out = self._choose(rows, now, max(3, self._console.height - _AROUND))
            for row in shown:
                if row.group in ("failed", "done"):
                    self._read(row)
            return Group(*map(_cut, (title, counts)), self._table(shown), _cut(Text(left_out, style="dim")))

    def _choose(self, rows: list[RunProgress], now: float, room: int) -> tuple[list[RunProgress], str]:
        """Return the rows to show: active, failed, recently finished and next runs; and the text for the rest.

        Active and next runs are in the plan's order, queued ones first; the others are in reverse order of time.
        """
        latest = sorted(rows, key=lambda row: -row.since)
        running, queued, waiting = (
            [row for row in rows if row.group == name] for name in ("running", "pending", "waiting")
        )
        failed = [row for row in latest if row.group == "failed"]
        just = [row for row in latest if row.group == "done" and now - row.since < _JUST_S]
        num_failed = min(len(failed), max(room // 3, room - len(running)))
        num_running = min(len(running), room - num_failed)
        shown = [*running[:num_running], *failed[:num_failed], *just, *queued, *waiting][:room]
        rest = {"running": len(running) - num_running, "failed": len(failed) - num_failed}
        return shown, ", ".join(f"and {count} more {name}" for name, count in rest.items() if count)

    def _read(self, row: RunProgress) -> tuple[int, float] | None:
        """Return the last step in a run's log, and the seconds of a step so far."""
        steps = self._progress.steps(row.run)
        if not steps:
            return None
        self._steps[row.run.key] = steps[-1]
        times = [step.step_time_s for step in steps[row.run.warmup_steps :] or steps if step.step_time_s]
        return (steps[-1].step, median(times)) if times else None

    def _table(self, rows: list[RunProgress]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("point", no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("state", no_wrap=True)
        for name in ("step", "s/step", "TFLOP/s/GPU", "loss") if self._console.width >= _NARROW else ("step",):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*islice(self._cells(row), len(table.columns)))
        return table

    def _cells(self, row: RunProgress) -> Iterator[Text]:
        run, step = row.run, self._steps.get(row.run.key)
        several = len({each.test_id for each in self._plan.runs}) > 1
        name = f"{run.test_id}/{run.label}" if several else run.label
        repeats = any(each.iteration for each in self._plan.runs)
        yield Text(visible(f"{name}/{run.iteration}" if repeats else name))
        style = _STYLE.get(row.status.job_class, "red") if row.status else "dim"
        if row.verdict:
            style = "green" if row.verdict == Verdict.SUCCESS else "red"
        yield Text(visible(row.verdict or (row.status.state if row.status else row.group)), style=style)
        yield Text("" if row.group in ("pending", "waiting") else f"{step.step if step else 0}/{run.num_steps or '?'}")
        yield _number(step.step_time_s if step else None)
        yield _number(step.tflops_per_gpu or None if step else None)
        yield _number(step.loss if step else None)


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _number(value: float | None) -> Text:
    return Text("" if value is None else f"{value:.4g}")


def observer_for(console: Console, plan: ScenarioPlan, root: Path) -> PlainObserver | Screen:
    """Return the screen on a terminal, otherwise plain lines."""
    clock = clock_of(plan, root)
    return Screen(console, plan, root, clock) if console.is_terminal else PlainObserver(console.file, plan, clock)


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
    require_page(page)
    console.print_line(f"page: {page}")
    due_at = 0.0

    def write_if_due() -> None:  # the last time must be long enough ago: a report of many points takes long itself
        nonlocal due_at
        if (begin := time.monotonic()) >= due_at:
            _write_page(page, root, plan, reload_s=_RELOAD_S)
            due_at = max(begin + _RELOAD_S, time.monotonic() + _COST * (time.monotonic() - begin))

    try:
        return _watch(console, plan, root, write_if_due)
    finally:
        _write_page(page, root, plan, reload_s=None)


def _write_page(page: Path, root: Path, plan: ScenarioPlan, *, reload_s: int | None) -> None:
    """Write the page of a run's report, atomically. reload_s: after how long it loads itself again, None for never."""
    with reading(root) as held_by:
        is_open = _num_open(plan, read_entries(root)) > 0
        report = build_report(root, held_by or ("no process" if is_open else None)).to_dict()
    links = log_links(report, root, page)
    write_text(page, render_html(report, logs=links, reload_s=reload_s))


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
                entries = read_entries(root)
                was, now = observer.clock, RunClock(plan)
                now.catch_up(entries)
                for old, new in zip(was.rows.values(), now.rows.values(), strict=True):
                    if new.status is not None and (old.status is None or old.status.state != new.status.state):
                        observer.saw(new.run, new.status, new.since)
                    if new.verdict and new.verdict != old.verdict:
                        observer.decided(new.run, new.verdict, entries[new.run.key].reasons)
                was.catch_up(entries)
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
