"""Show how a sweep goes: a live table on a terminal, plain lines elsewhere."""

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.control import strip_control_codes
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cloudai_mbridge.files.regular import open_regular, read_chunks
from cloudai_mbridge.logs import LogParser, StepRecord
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.runner.finalizer import INTERRUPTED
from cloudai_mbridge.runner.progress import log_name
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus

# What a notice has said of all runs together, when they are cancelled
_SAID_OF_ALL = (INTERRUPTED.state, "COMPLETING")
_STYLE = {JobClass.ACTIVE: "cyan", JobClass.SUCCEEDED: "green", JobClass.CANCELLED: "yellow"}


class SteadyConsole(Console):
    """A console whose reader may go away: the runs go on, and nothing more is printed."""

    def print_line(self, text: str, style: str = "") -> None:
        """Print text as it is, on a line of its own however long."""
        self.print(Text(text, style=style), soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on, instead of ending the process."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def new_console(width: int = 140) -> SteadyConsole:
    """Return a console that keeps tables of this width whole where the output is not a terminal."""
    console = SteadyConsole(highlight=False)
    return console if console.is_terminal else SteadyConsole(highlight=False, width=width)


class PlainObserver(AbstractContextManager["PlainObserver"]):
    """One line per change of state."""

    def __init__(self, console: Console, plan: ScenarioPlan) -> None:
        self._console, self._total = console, sum(not run.is_again for run in plan.runs)
        self._last: dict[str, str] = {}
        self._ended: set[str] = set()  # a retry takes a run out again

    def __exit__(self, *exc: object) -> None:
        """Leave the lines as they are."""

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        if self._last.get(run.key) == status.state:
            return
        self._last[run.key] = status.state
        (self._ended.add if status.is_final else self._ended.discard)(run.key)
        if status.state in _SAID_OF_ALL:
            return
        reason = f" ({status.reason})" if status.reason else ""
        self._print(f"[{len(self._ended)}/{self._total}] {run.key}: {status.state}{reason}")

    def notice(self, text: str) -> None:
        self._print(f"notice: {text}")

    def _print(self, text: str) -> None:
        """Print a line, if that is possible: jobs are watched on even if the disk of the output is full."""
        with contextlib.suppress(OSError):
            print(strip_control_codes(text), file=self._console.file, flush=True)  # a console takes 2 ms for a line


class LiveObserver(AbstractContextManager["LiveObserver"]):
    """A table that follows the logs of the active runs."""

    def __init__(self, console: Console, plan: ScenarioPlan, root: Path) -> None:
        self._rows = {run.key: _Row(run, root / run.key / log_name(run)) for run in plan.runs}
        self._live = Live(self._table(), console=console, refresh_per_second=4)

    def __enter__(self) -> "LiveObserver":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.update(self._table())
        self._live.stop()

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        self._rows[run.key].update(status)
        self._live.update(self._table())

    def notice(self, text: str) -> None:
        self._live.console.print(Text(f"notice: {text}"))

    def _table(self) -> Table:
        table = Table("point", "state", "step", "progress", "step time (s)", "TFLOP/s/GPU", "loss")
        for row in self._rows.values():
            if row.is_shown:
                table.add_row(*row.cells())
        return table


class _Row:
    """What the table says of one run; reads only what its log has grown by."""

    def __init__(self, run: RunPlan, log: Path) -> None:
        self._run, self._log = run, log
        self._parser, self._offset = LogParser(), 0
        self._status: JobStatus | None = None
        self._step: StepRecord | None = None

    def update(self, status: JobStatus) -> None:
        self._status = status
        try:
            with open_regular(self._log) as log:
                log.seek(self._offset)
                for chunk in read_chunks(log):
                    self._parser.feed(chunk)
                self._offset = log.tell()
        except OSError:
            return
        steps = self._parser.summary().steps
        self._step = steps[-1] if steps else None

    @property
    def is_shown(self) -> bool:
        """A search leaves most of its points out."""
        return self._run.search is None or self._status is not None

    def cells(self) -> tuple[Text | ProgressBar, ...]:
        step, total = self._step, self._run.num_steps
        state = Text("waiting", style="dim")
        if self._status is not None:
            state = Text(self._status.state, style=_STYLE.get(self._status.job_class, "red"))
        done = step.step if step else 0
        return (
            Text(f"{self._run.test_id}/{self._run.label}"),
            state,
            Text(f"{done}/{total or '?'}"),
            ProgressBar(total=total, completed=done, width=20),
            _number(step.step_time_s if step else None),
            _number(step.tflops_per_gpu if step else None),
            _number(step.loss if step else None),
        )


def _number(value: float | None) -> Text:
    return Text("" if value is None else f"{value:.4g}")


def observer_for(console: Console, plan: ScenarioPlan, root: Path) -> PlainObserver | LiveObserver:
    """Return the live table on a terminal, plain lines elsewhere."""
    return LiveObserver(console, plan, root) if console.is_terminal else PlainObserver(console, plan)
