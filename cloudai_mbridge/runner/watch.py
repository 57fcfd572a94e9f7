"""Bring every run of a plan to its end."""

import time
from pathlib import Path
from typing import Protocol

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.jobs import JobClass, JobStatus, Scheduler, SubmitRefused
from cloudai_mbridge.plan import RunPlan, SweepPlan
from cloudai_mbridge.runner.interrupt import Interrupted, Interrupts
from cloudai_mbridge.runner.journal import Journal

PATIENCE_S = 300.0


class Observer(Protocol):
    """Who wants to know how the runs go."""

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        """A run was submitted, looked at, or has ended."""

    def notice(self, text: str) -> None:
        """Something happened that concerns no single run."""


def run_all(
    plan: SweepPlan,
    root: Path,
    scheduler: Scheduler,
    journal: Journal,
    observer: Observer,
    *,
    max_parallel: int,
    interval_s: float,
) -> None:
    """Submit every run when its turn comes and watch it until it has ended. A failed run does not stop the others.

    Raises:
        Interrupted: a signal came; the active jobs have been cancelled and have ended.
        ToolFailure: the scheduler did not answer for PATIENCE_S; the message names the jobs that may still run.
    """
    sweep = _Sweep(plan, root, scheduler, journal, observer)
    with Interrupts() as interrupts:
        try:
            while sweep.waiting or sweep.active:
                sweep.submit_ready(max_parallel, interrupts)
                sweep.look()
                interrupts.sleep(interval_s if sweep.active else 0)
                interrupts.check()
        except Interrupted:
            sweep.cancel()
            raise


class _Sweep:
    """The runs of a plan: waiting, active (by job id), started and ended (by key)."""

    def __init__(self, plan: SweepPlan, root: Path, scheduler: Scheduler, journal: Journal, observer: Observer) -> None:
        self.waiting = list(plan.runs)
        self.active: dict[str, RunPlan] = {}
        self._started: set[str] = set()
        self._ended: set[str] = set()
        self._keys_of: dict[str, set[str]] = {}
        for run in plan.runs:
            self._keys_of.setdefault(run.test_id, set()).add(run.key)
        self._root, self._scheduler, self._journal, self._observer = root, scheduler, journal, observer
        self._silent_since: float | None = None

    def submit_ready(self, max_parallel: int, interrupts: Interrupts) -> None:
        """Submit, in order, what waits for no other test, up to the limit."""
        for run in list(self.waiting):
            interrupts.check()
            if len(self.active) >= max_parallel:
                return
            if self._is_ready(run):
                self.waiting.remove(run)
                self._submit(run)

    def _is_ready(self, run: RunPlan) -> bool:
        completed = all(self._keys_of.get(test, set()) <= self._ended for test in run.after_completion)
        return completed and all(self._keys_of.get(test, set()) <= self._started for test in run.after_start)

    def _submit(self, run: RunPlan) -> None:
        try:
            job_id = self._scheduler.submit(run, self._root / run.key)
        except SubmitRefused as error:
            self._saw(run, JobStatus("REFUSED", JobClass.FAILED, reason=f"the scheduler said: {error}"))
            return
        except ToolFailure as error:
            self.waiting.insert(0, run)
            self._bear(error)
            return
        self.active[job_id] = run
        self._journal.submitted(run.key, job_id)
        self._saw(run, JobStatus("PENDING", JobClass.ACTIVE))

    def look(self) -> None:
        """Ask for all active jobs at once."""
        try:
            seen = self._scheduler.poll({job_id: self._root / run.key for job_id, run in self.active.items()})
        except ToolFailure as error:
            self._bear(error)
            return
        self._silent_since = None
        for job_id, status in seen.items():
            run = self.active.pop(job_id) if status.is_final else self.active[job_id]
            self._saw(run, status)

    def _bear(self, error: ToolFailure) -> None:
        """Wait for a scheduler that does not answer, but not for ever."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self._observer.notice(f"{error}; asking again")
        if now - self._silent_since > PATIENCE_S:
            raise ToolFailure(f"{error}; gave up after {PATIENCE_S:.0f} s; may still run: {', '.join(self.active)}")

    def _saw(self, run: RunPlan, status: JobStatus) -> None:
        if status.is_final:
            self._ended.add(run.key)
        if status.state != "PENDING":
            self._started.add(run.key)
        self._journal.saw(run.key, status)
        self._observer.saw(run, status)

    def cancel(self) -> None:
        """Cancel what is active and wait until it has ended; what waits stays unsubmitted."""
        self._observer.notice(f"cancelling {len(self.active)} active jobs")
        self.waiting.clear()
        try:
            self._scheduler.cancel(list(self.active))
            while self.active:
                self.look()
                time.sleep(0.2)
        except ToolFailure as error:
            self._observer.notice(f"{error}; may still run: {', '.join(self.active)}")
