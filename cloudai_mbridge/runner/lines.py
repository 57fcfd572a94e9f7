"""The progress of a run as lines."""

import contextlib
import threading
import time
from contextlib import AbstractContextManager
from typing import IO

from rich.control import strip_control_codes

from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.runner.clock import RunClock, counts_text, time_text
from cloudai_mbridge.runner.finalizer import INTERRUPTED
from cloudai_mbridge.schedulers.interface import COMPLETING, JobClass, JobStatus
from cloudai_mbridge.verdict import Verdict

# States that one notice reports for all runs together, when they are cancelled
_SAID_OF_ALL = (INTERRUPTED.state, COMPLETING)
_HEARTBEAT_S = 60.0


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
