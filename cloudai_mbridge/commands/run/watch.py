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

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole, new_console
from cloudai_mbridge.commands.options import PATH, run_argument
from cloudai_mbridge.errors import OK, BadInput, MBridgeError, counted
from cloudai_mbridge.files.replace import require_page, write_text
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import Metrics, counted_steps, measure
from cloudai_mbridge.plan import ROOT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.read import read_plan, read_plan_data, refuse_dry_run
from cloudai_mbridge.report.build import build_report
from cloudai_mbridge.report.html import log_links, render_html
from cloudai_mbridge.report.terminal import render_ending
from cloudai_mbridge.runner.clock import PlainObserver, RunClock, RunProgress, clock_of, counts_text, time_text
from cloudai_mbridge.runner.interrupt import Pace
from cloudai_mbridge.runner.journal import read_entries
from cloudai_mbridge.runner.journal_file import JournalEntry
from cloudai_mbridge.runner.lock import has_driver, no_driver, reading
from cloudai_mbridge.runner.observe import Observed, is_left
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus, Scheduler
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
        self._steps: dict[str, tuple[StepRecord, Metrics]] = {}
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
        warmup = self._progress.last_warmup(row.run)
        self._steps[row.run.key] = steps[-1], measure(steps, warmup, None, row.run.num_steps)
        counted = counted_steps(steps, warmup)
        times = [step.step_time_s for step in counted or steps if step.step_time_s]
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
        run, (step, metrics) = row.run, self._steps.get(row.run.key, (None, None))
        several = len({each.test_id for each in self._plan.runs}) > 1
        name = f"{run.test_id}/{run.label}" if several else run.label
        repeats = any(each.iteration for each in self._plan.runs)
        yield Text(visible(f"{name}/{run.iteration}" if repeats else name))
        style = _STYLE.get(row.status.job_class, "red") if row.status else "dim"
        if row.verdict:
            style = "green" if row.verdict == Verdict.SUCCESS else "red"
        yield Text(visible(row.verdict or (row.status.state if row.status else row.group)), style=style)
        yield Text("" if row.group in ("pending", "waiting") else f"{step.step if step else 0}/{run.num_steps or '?'}")
        for number, of_step in (("step_time_s", "step_time_s"), ("tflops_per_gpu", "tflops_per_gpu")):
            # the report's number so far; before the first counted step, the last step's
            found = getattr(metrics, number, None)
            yield _number(found.capped_mean if found else getattr(step, of_step, None) or None)
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


_LOOK_S, _LONGEST_LOOK_S = 1.0, 30.0
_GONE_S = 20.0  # how long to look for a job that the scheduler does not know and that left no end
_RELOAD_S = 5  # of the page; a busy machine writes it less often
_COST = 10.0


@click.command()
@run_argument("root")
@click.option("--html", "page", type=PATH, help="Write the report's page again and again, until the run has ended.")
def watch(root: Path, page: Path | None) -> int:
    """Watch a run, whichever process drives it, until it has ended. Ctrl-C ends the watching, not the run.

    Of a run that no process holds, watch its jobs until all have ended; nothing is submitted or judged.
    """
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
            _write_page(page, root, reload_s=_RELOAD_S)
            due_at = max(begin + _RELOAD_S, time.monotonic() + _COST * (time.monotonic() - begin))

    try:
        return _watch(console, plan, root, write_if_due)
    finally:
        _write_page(page, root, reload_s=None)


def _write_page(page: Path, root: Path, *, reload_s: int | None) -> None:
    """Write the page of a run's report, atomically. reload_s: after how long it loads itself again, None for never."""
    with pipeline.observing(root) as observed:
        report = build_report(root, observed).to_dict()
    links = log_links(report, root, page)
    write_text(page, render_html(report, logs=links, reload_s=reload_s))


class _Jobs:
    """Jobs of a run that no process holds, observed with the pace of a driver."""

    def __init__(self, root: Path, notice: Callable[[str], None]) -> None:
        self._root, self._notice = root, notice
        self._scheduler: Scheduler | None = None
        self._pace = Pace(_LOOK_S, _LONGEST_LOOK_S)
        self._observed, self._due_at, self._has_told = Observed(), 0.0, False
        self._gone_since: float | None = None

    def are_active(self) -> bool:
        """Observe the jobs, if the last time was long ago; return whether one is active, or may be."""
        if (begin := time.monotonic()) < self._due_at:
            return True
        before = {key: seen.status.state for key, seen in self._observed.jobs.items()}
        try:
            with reading(self._root) as held_by:
                if self._scheduler is None:
                    self._scheduler = pipeline.reader_of(self._root, read_plan_data(self._root)["runs"])
                self._observed = pipeline.observe(self._root, held_by, self._scheduler)
        except MBridgeError:
            return False  # which is said of the journal or the system when it is read again
        if (trouble := self._observed.trouble) and not self._has_told:
            self._has_told = True
            self._notice(f"{trouble}; asking again, and looking into the files of the jobs")
        if before != {key: seen.status.state for key, seen in self._observed.jobs.items()}:
            self._pace.changed()
        self._due_at = time.monotonic() + self._pace.interval(time.monotonic() - begin)
        classes = {seen.status.job_class for seen in self._observed.jobs.values()}
        if held_by is not None or trouble or JobClass.ACTIVE in classes:
            self._gone_since = None
            return True
        self._gone_since = self._gone_since or begin  # files of a job may be late
        return JobClass.UNKNOWN in classes and begin - self._gone_since < _GONE_S

    def observed_in(self, entries: Mapping[str, JournalEntry], *, is_driven: bool) -> Mapping[str, JournalEntry]:
        """Return the journal's entries, with the jobs as observed if no process drives the run."""
        if is_driven:
            self._observed, self._due_at = Observed(), 0.0
        return self._observed.applied_to(entries)


def _num_open(plan: ScenarioPlan, entries: Mapping[str, JournalEntry]) -> int:
    return sum(run.key not in entries or entries[run.key].verdict is None for run in plan.runs)


def _watch(console: SteadyConsole, plan: ScenarioPlan, root: Path, look: Callable[[], None]) -> int:
    """Watch until nobody drives the run, and none of its jobs is active. look: called at every look."""
    try:
        with observer_for(console, plan, root) as observer:
            jobs = _Jobs(root, observer.notice)
            held_by = has_driver(root)
            is_active = held_by is not None or jobs.are_active()
            observer.clock.catch_up(jobs.observed_in(read_entries(root), is_driven=held_by is not None))
            if isinstance(observer, PlainObserver):
                observer.tick()
            while is_active:
                look()
                time.sleep(_LOOK_S)
                held_by = has_driver(root)
                is_active = held_by is not None or jobs.are_active()
                entries = jobs.observed_in(read_entries(root), is_driven=held_by is not None)
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
    if num_open := _num_open(plan, entries := read_entries(root)):
        left = f"{counted(num_open, 'run')} {'have' if num_open > 1 else 'has'} no verdict"
        if any(map(is_left, entries.values())):
            left += f" (jobs that have ended: mbridge show {root})"
        console.print_line(f"{left}, and no running process holds this run; continue with: mbridge resume {root}")
        return OK
    with no_driver(root):
        console.print(render_ending(build_report(root), console.width), crop=False)
    console.print_line(f"report: {root / ROOT_FILES.report_html}")
    return OK
