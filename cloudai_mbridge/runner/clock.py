"""State of every run of a scenario over time, an estimate of the remaining time, and both as lines."""

import contextlib
import math
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import IO

from rich.control import strip_control_codes

from cloudai_mbridge.errors import MBridgeError
from cloudai_mbridge.estimate.headline import START_UP_S
from cloudai_mbridge.models.slurm_values import format_time_limit
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.runner.finalizer import INTERRUPTED
from cloudai_mbridge.runner.journal import read_entries
from cloudai_mbridge.runner.journal_file import UNTRIED, Attempt, JournalEntry
from cloudai_mbridge.schedulers.interface import COMPLETING, PENDING, SUBMITTED, JobClass, JobStatus
from cloudai_mbridge.verdict import Verdict

_GROUPS = {
    **{JobClass.SUCCEEDED: "done", JobClass.STOPPED: "done"},
    **{JobClass.CANCELLED: "cancelled", JobClass.SKIPPED: "skipped"},
}
_SKIPPED = JobStatus("SKIPPED", JobClass.SKIPPED)
_ORDER = ("done", "failed", "running", "pending", "waiting")
# States that one notice reports for all runs together, when they are cancelled
_SAID_OF_ALL = (INTERRUPTED.state, COMPLETING)
_HEARTBEAT_S = 60.0


@dataclass
class RunProgress:
    """A run. since: when its state began; used_s: run time of its ended attempts."""

    run: RunPlan
    status: JobStatus | None = None
    verdict: str = ""
    since: float = 0.0
    used_s: float = 0.0

    @property
    def group(self) -> str:
        """State under which the run is counted."""
        if self.status is None:
            return "waiting"
        if not self.status.is_final:
            return "pending" if self.status.state == PENDING else "running"
        if self.verdict:
            return "done" if self.verdict == Verdict.SUCCESS else self.verdict
        return _GROUPS.get(self.status.job_class, "failed")

    @property
    def is_counted(self) -> bool:
        """Whether the run is counted: a search leaves most of its points out."""
        return self.run.search is None or self.status is not None


@dataclass
class RunClock:
    """State of all runs over time, with the expected rest.

    started_at: when the whole began. Times are seconds of `time.time`. is_stopping: every job is being cancelled.
    """

    plan: ScenarioPlan
    started_at: float = field(default_factory=time.time)
    rows: dict[str, RunProgress] = field(default_factory=dict)
    is_stopping: bool = False
    _most_gpu_s: float = 0.0

    def __post_init__(self) -> None:
        self.rows = {run.key: RunProgress(run) for run in self.plan.runs}

    def catch_up(self, entries: Mapping[str, JournalEntry]) -> None:
        """Apply the journal's entries."""
        begun = [
            attempt.submitted_at for entry in entries.values() for attempt in entry.attempts if attempt.submitted_at
        ]
        if begun:
            self.started_at = _seconds(min(begun))
        for row in self.rows.values():
            entry = entries.get(row.run.key)
            if entry is None or entry.verdict == UNTRIED or not (entry.attempts or entry.verdict):
                continue
            row.verdict, last = entry.verdict or "", entry.last
            row.status = (last.status or SUBMITTED) if last else _SKIPPED
            row.used_s = sum(map(_used_s, entry.attempts))
            at = (last.ended_at if row.status.is_final else last.started_at) if last else None
            row.since = _seconds(at) if at else row.since or time.time()
            ending = last.ending if last and not row.status.is_final else None
            self.is_stopping |= ending is not None and ending.state == INTERRUPTED.state

    def saw(self, run: RunPlan, status: JobStatus, at: float | None = None) -> None:
        """Note a run's state. at: since when it has it; default: now. A job that completes still holds its GPUs."""
        row, at = self.rows[run.key], time.time() if at is None else at
        if status.is_final and not (row.status and row.status.is_final):
            row.used_s += status.run_time_s if status.run_time_s is not None else self._running_s(row, at)
        was, used_s = row.group, self._running_s(row, at)
        has_changed = row.status is None or row.status.state != status.state
        row.status, row.verdict = status, ""
        if was == "running" and row.group == "pending":  # the scheduler starts it again
            row.used_s += used_s
        if has_changed and not was == row.group == "running":
            row.since = at

    def decided(self, run: RunPlan, verdict: str) -> None:
        self.rows[run.key].verdict = verdict

    @property
    def counts(self) -> Counter[str]:
        return Counter(row.group for row in self.rows.values() if row.is_counted)

    @property
    def ended_at(self) -> float | None:
        """Time at which the last run ended; None while one has not."""
        rows = [row for row in self.rows.values() if row.is_counted]
        if not all(row.status and row.status.is_final for row in rows):
            return None
        return max((row.since for row in rows if row.status != _SKIPPED), default=None)

    def gpu_hours(self, now: float) -> float:
        """Return the GPU-hours of all attempts, of whole nodes where jobs take these.

        They never fall, even if a job's own time is less than was seen.
        """
        seconds = ((row.used_s + self._running_s(row, now)) * row.run.held_gpus for row in self.rows.values())
        self._most_gpu_s = max(self._most_gpu_s, sum(seconds))
        return self._most_gpu_s / 3600

    def left_s(self, now: float, steps: Mapping[str, tuple[int, float]]) -> float | None:
        """Return about how long the rest takes; None before a run has ended, while all are cancelled, and in a search.

        steps: of running runs, by key: the last step, and the seconds of one. Predictions, start-up included, are
        corrected by the ended runs; without a prediction, a run is assumed to last as long as the mean ended run.
        No run is assumed to last longer than its time limit.
        """
        ended = [row for row in self.rows.values() if row.group == "done" and row.used_s]
        if not ended or self.is_stopping or any(run.search is not None for run in self.plan.runs):
            return None
        ratios = [row.used_s / expected for row in ended if (expected := _predicted_s(row.run))]
        left = []
        for row in self.rows.values():
            if row.status and row.status.is_final:
                continue
            expected = _predicted_s(row.run)
            if expected is not None and ratios:
                expected *= median(ratios)
            else:
                expected = fmean(each.used_s for each in ended)
            done, step_s = steps.get(row.run.key, (0, 0.0))
            running_s, most_s = self._running_s(row, now), row.run.time_limit_s or math.inf
            rest_s = (row.run.num_steps - done) * step_s if done and row.run.num_steps else expected - running_s
            left.append(max(0.0, min(rest_s, most_s - running_s)))
        at_once = max(1, self.counts["running"])
        return max(max(left, default=0.0), sum(left) / at_once)

    @staticmethod
    def _running_s(row: RunProgress, now: float) -> float:
        return max(0.0, now - row.since) if row.group == "running" else 0.0


def _used_s(attempt: Attempt) -> float:
    """Return the run time of an attempt, 0 while it runs."""
    status = attempt.status
    if status is None or not status.is_final:
        return 0.0
    if status.run_time_s is not None:
        return status.run_time_s
    known = attempt.started_at and attempt.ended_at
    return _seconds(attempt.ended_at) - _seconds(attempt.started_at) if known else 0.0


def _seconds(at: str | None) -> float:
    return datetime.fromisoformat(at).timestamp() if at else 0.0


def _predicted_s(run: RunPlan) -> float | None:
    step_s = (run.predicted or {}).get("step_time_s")
    return START_UP_S + step_s * run.num_steps if step_s and run.num_steps else None


def counts_text(clock: RunClock) -> str:
    """Return the counts of runs by state, as a line."""
    counts = clock.counts
    return ", ".join(f"{counts[group]} {group}" for group in (*_ORDER, *sorted({*counts} - {*_ORDER})) if counts[group])


def time_text(clock: RunClock, now: float, steps: Mapping[str, tuple[int, float]]) -> str:
    """Return the elapsed and the estimated remaining time, as text. steps: as in `RunClock.left_s`."""
    now = clock.ended_at or now
    left = clock.left_s(now, steps) if clock.counts["running"] + clock.counts["waiting"] else None
    more = f", about {format_time_limit(left)} left" if left and left >= 1 else ""
    return f"{format_time_limit(max(0.0, now - clock.started_at))} elapsed{more}"


def clock_of(plan: ScenarioPlan, root: Path) -> RunClock:
    """Return the clock of a run from its journal; an unreadable journal is left to the run's driver."""
    clock = RunClock(plan)
    with contextlib.suppress(MBridgeError, sqlite3.Error):
        clock.catch_up(read_entries(root))
    return clock


class PlainObserver(AbstractContextManager["PlainObserver"]):
    """One line per change, with the time; without changes, one a minute."""

    def __init__(
        self, file: IO[str], plan: ScenarioPlan, clock: RunClock | None = None, heartbeat_s: float = _HEARTBEAT_S
    ) -> None:
        self.clock = clock or RunClock(plan)
        self._file, self._total = file, sum(not run.is_again for run in plan.runs)
        known = {row.run.key: row.status for row in self.clock.rows.values() if row.status}
        self._last = {key: status.state for key, status in known.items()}
        self._ended = {key for key, status in known.items() if status.is_final}  # a retry takes a run out again
        self._heartbeat_s, self._over, self._lock = heartbeat_s, threading.Event(), threading.RLock()
        self._printed_at = time.monotonic()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "PlainObserver":
        self._heart.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._heart.join()

    def saw(self, run: RunPlan, status: JobStatus, at: float | None = None) -> None:
        with self._lock:
            self.clock.saw(run, status, at)
            if self._last.get(run.key) == status.state:
                return
            self._last[run.key] = status.state
            (self._ended.add if status.is_final else self._ended.discard)(run.key)
            if status.state not in _SAID_OF_ALL and status.job_class is not JobClass.SUCCEEDED:  # `decided` prints it
                reason = f" ({status.reason})" if status.reason else ""
                self._print(f"[{len(self._ended)}/{self._total}] {run.key}: {status.state}{reason}")

    def decided(self, run: RunPlan, verdict: str, reasons: tuple[str, ...]) -> None:
        """Print the verdict on a job that ended well; any other job's state has been printed already."""
        with self._lock:
            self.clock.decided(run, verdict)
            if self._last.get(run.key) == "COMPLETED":
                why = f": {'; '.join(reasons)}" if verdict != Verdict.SUCCESS else ""
                self._print(f"[{len(self._ended)}/{self._total}] {run.key}: {verdict}{why}")

    def notice(self, text: str) -> None:
        self._print(f"notice: {text}")

    def stopping(self) -> None:
        self.clock.is_stopping = True

    def tick(self) -> None:
        """Print a summary of all runs."""
        self._print(f"{counts_text(self.clock)}; {time_text(self.clock, time.time(), {})}")

    def _beat(self) -> None:
        while not self._over.wait(self._heartbeat_s / 10):
            with self._lock:
                if time.monotonic() - self._printed_at >= self._heartbeat_s:
                    self.tick()

    def _print(self, text: str) -> None:
        """Print a line if possible: jobs stay watched even if the disk of the output is full."""
        with self._lock, contextlib.suppress(OSError):
            self._printed_at = time.monotonic()
            line = f"{time.strftime('%H:%M:%S')} {strip_control_codes(text)}"
            print(line, file=self._file, flush=True)  # a console takes 2 ms for a line
