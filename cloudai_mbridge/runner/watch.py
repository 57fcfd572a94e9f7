"""Bring every run of a plan to its end: submit ready runs, poll the jobs, cancel jobs that hang or cannot start."""

import contextlib
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from cloudai_mbridge.errors import Damaged, MBridgeError, ToolFailure, counted
from cloudai_mbridge.files.replace import free_space, is_disk_full, no_space_left
from cloudai_mbridge.plan import ROOT_FILES, ScenarioPlan
from cloudai_mbridge.runner.context import Chooser, Judge, Observer, Phase, RunnerContext, Tracked
from cloudai_mbridge.runner.finalizer import INTERRUPTED, Finalizer
from cloudai_mbridge.runner.interrupt import Detached, Interrupted, Interrupts, Pace, SecondSignal
from cloudai_mbridge.runner.journal import Journal
from cloudai_mbridge.runner.lock import beat, clear_cancel, driver_lock, is_cancel_requested, submit_lock
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.runner.restore import require_known, restore_runs, restore_tokens
from cloudai_mbridge.runner.submitter import Submitter
from cloudai_mbridge.schedulers.interface import (
    COMPLETING,
    ENDED_EARLY,
    FORGOTTEN,
    NEVER_STARTED,
    RUNNING,
    JobClass,
    JobStatus,
    Scheduler,
)
from cloudai_mbridge.verdict.judge import LOST

# A pending job that can never start is polled twice before it is given up: an administrator may be at work.
HOPELESS_S = 10.0
_ASK_FOR_LOST_S = 1.0
_STOPPING_INTERVAL_S = 0.3


def run_all(
    plan: ScenarioPlan,
    root: Path,
    scheduler: Scheduler,
    observer: Observer,
    judge: Judge,
    *,
    pace: Pace,
    only_cancel: bool = False,
    has_lock: bool = False,
    is_throttled: bool = False,
    choosers: Mapping[str, Chooser] = MappingProxyType({}),
    may_be_late: bool = False,
    interrupts: Interrupts | None = None,
) -> None:
    """Submit every run when its turn comes and watch it until it has ended. A failed run does not stop the others.

    Work of an earlier process in the same directory is continued, or with `only_cancel` cancelled.
    has_lock: the caller holds the directory's `driver_lock`. is_throttled: the limit on active runs is new, and is that
    of job arrays of an earlier process, too. choosers: of the tests to search, by id; of other tests
    every run is submitted. may_be_late: files of jobs are seen later than their ends. interrupts: with settings for a
    terminal or for detaching.

    InUse: another process holds the directory; nothing was written.
    Damaged: its journal is lost.
    Interrupted: a signal came, or `mbridge cancel`; the active jobs have been cancelled.
    Detached: requested by `interrupts`; the active jobs were left.
    Paused: the scheduler did not answer for too long.
    ToolFailure: the journal cannot be written. In all cases the message names the jobs that may still run.
    """
    lock = contextlib.nullcontext() if has_lock else driver_lock(root)
    interrupts = interrupts or Interrupts()
    with lock, contextlib.closing(_opened(root / ROOT_FILES.journal)) as journal:
        journal.goes_on()
        clear_cancel(root)  # a request to an earlier process
        with submit_lock(root, observer.notice) as keep_open, interrupts:
            journal.plan(run.key for run in plan.runs)
            if only_cancel:
                interrupts.request(signal.SIGTERM)
            context = RunnerContext(plan, root, scheduler, journal, observer)
            restore_tokens(journal, context.log)
            require_known(root, journal.entries().values(), context.log)
            watcher = Watcher(context, judge, keep_open, choosers, interrupts.check, may_be_late=may_be_late)
            with _ends(watcher, interrupts):
                restore_runs(context, watcher.submitter, watcher.finalizer)
                watcher.submitter.resubmit_moved()
                watcher.poll()
                if is_throttled:
                    watcher.submitter.throttle()
                if context.lost():  # to cancel jobs that run after they were given up, although all runs have ended
                    _check(root, interrupts)
                while not context.is_over:
                    _check(root, interrupts)
                    _require_journal(root)
                    before = {run.token for run in context.active()}
                    watcher.submitter.submit_ready(interrupts)
                    _require_journal(root)
                    has_ended = watcher.poll()
                    active = {run.token for run in context.active()}
                    # The last pass has submitted no other job, and left no submission in doubt
                    is_submitted = bool(active) and active <= before and not context.unsure
                    if interrupts.detaches and not context.is_over and is_submitted:
                        raise Detached
                    if context.has_changed:
                        context.has_changed = False
                        pace.changed()
                    # A run that has ended makes room; a submission is followed by a poll
                    if not (has_ended and watcher.submitter.may_submit()) and not context.is_over:
                        interrupts.sleep(pace.interval(watcher.poll_s), lambda: is_cancel_requested(root))


def _opened(path: Path) -> Journal:
    """Open or create the journal. BadInput: not a journal. OSError: the disk is full."""
    try:
        return Journal(path)
    except MBridgeError as error:
        if is_disk_full(error.__context__, path):
            raise no_space_left(path) from None
        raise


@contextlib.contextmanager
def _ends(watcher: "Watcher", interrupts: Interrupts) -> Iterator[None]:
    """Stop everything at an interrupt; name the jobs that may still run after any other error."""
    context, path = watcher.context, watcher.context.root / ROOT_FILES.journal
    try:
        yield
    except Interrupted as interrupted:
        _stop(watcher, interrupts, interrupted)
    except Detached:
        waiting = sum(run.phase is Phase.WAITING and run.plan.search is None for run in context.runs)
        text = f"detached: {counted(len(context.may_still_run()), 'job')} left to the scheduler"
        text += f", {counted(waiting, 'run')} not submitted yet" if waiting else ""
        context.journal.note(text)
        raise Detached(f"{text}; continue with: mbridge resume {context.root}") from None
    except (ToolFailure, Damaged, OSError, sqlite3.Error) as error:
        is_full = is_disk_full(error, path) or is_disk_full(error.__context__, path)
        space = f" ({path}: {free_space(path)})" if is_full else ""
        raise ToolFailure(f"{error}{space}{_left(context)}") from None
    except MBridgeError:
        raise
    except Exception:
        context.observer.notice(f"mbridge stopped because of a defect{_left(context)}")
        raise


def _require_journal(root: Path) -> None:
    """Raise ToolFailure if the directory is gone: its points would be judged by files that are elsewhere."""
    if not (root / ROOT_FILES.journal).exists():
        raise ToolFailure(
            f"{root}: was moved or deleted while mbridge was running;"
            " move it back and continue with mbridge resume, or resume it where it is now"
        )


def _left(context: RunnerContext) -> str:
    jobs = ", ".join(context.may_still_run())
    return f"; may still run: {jobs}; continue with: mbridge resume {context.root}" if jobs else ""


def _check(root: Path, interrupts: Interrupts) -> None:
    """Raise Interrupted if a signal, or a request to cancel, has come."""
    if is_cancel_requested(root):
        clear_cancel(root)
        interrupts.request(signal.SIGTERM)
    interrupts.check()


def _stop(watcher: "Watcher", interrupts: Interrupts, interrupted: Interrupted) -> None:
    """Cancel everything and wait for it, until a second signal; in the end raise Interrupted.

    Paused: the scheduler is silent, or does not end the jobs: they may still run.
    """
    context = watcher.context
    try:
        context.journal.stopped()
        watcher.stop()
        interrupts.cancelling()
        while context.may_still_run() or watcher.finalizer.has_unjudged:
            watcher.poll_while_stopping()
            time.sleep(_STOPPING_INTERVAL_S)
    except (ToolFailure, Damaged, OSError, sqlite3.Error) as error:
        with contextlib.suppress(ToolFailure):
            context.scheduler.cancel(context.jobs(context.active()))
        raise ToolFailure(f"{error}{_left(context)}") from None
    except SecondSignal:
        raise Interrupted(interrupted.number, ", ".join(context.may_still_run())) from None
    raise interrupted


class Watcher:
    """Polls the jobs of all active runs at once, and cancels jobs that hang or cannot start.

    Every change is in the journal before anything else follows from it, so that another process can continue.
    """

    def __init__(
        self,
        context: RunnerContext,
        judge: Judge,
        keep_open: int | None,
        choosers: Mapping[str, Chooser],
        check: Callable[[], None] = lambda: None,
        *,
        may_be_late: bool,
    ) -> None:
        """keep_open: the lock on submissions, for the commands that submit. choosers, may_be_late: as in `run_all`.

        check: as in `Finalizer`.
        """
        self.context = context
        self.finalizer = Finalizer(context, judge, check)
        self.submitter = Submitter(context, self.finalizer, keep_open, choosers)
        self._progress = Progress(context.root)
        self._may_be_late = may_be_late
        self.poll_s = 0.0
        self._ask_for_lost_after = 0.0
        self._stopping_since: float | None = None

    def poll(self) -> bool:
        """Poll all active jobs in one call; cancel jobs that hang or cannot start. Return whether one has ended."""
        active = {run.plan.key: run for run in self.context.active()}
        if not active:
            return False
        asked_at = time.monotonic()
        try:
            seen = self.context.scheduler.poll(self.context.jobs(active.values()))
        except ToolFailure as error:
            self.context.tolerate(error)
            return False
        finally:
            self.poll_s = time.monotonic() - asked_at
        self.context.answered()
        beat(self.context.root)
        with self.context.journal.transaction():
            for key, job in seen.items():
                if job.job_id != active[key].job_id:
                    self.context.adopt(active[key], job.job_id)
                self._saw(active[key], job.status)
        ended = [run for run in active.values() if run.phase is Phase.ENDED]
        for run in ended:
            self._progress.forget(run.plan)
        self.finalizer.cancel_duplicates(run for run in ended if seen[run.plan.key].has_rivals)
        self.finalizer.conclude(ended)
        self.finalizer.continue_stopping()
        endings = [(run, self._enforce(run, time.monotonic())) for run in self.context.active()]
        self.finalizer.end((run, ending) for run, ending in endings if ending is not None)
        self.finalizer.cancel_again()
        return bool(ended)

    def _saw(self, run: Tracked, status: JobStatus) -> None:
        if status.is_final:
            if not self._awaits_files(run, status):
                self.finalizer.record(run, status)
            return
        if run.status is None or (status.state, status.restarts) != (run.status.state, run.status.restarts):
            self.context.has_changed = True
            self.context.journal.saw(run.plan.key, run.number, status)
            self.context.observer.saw(run.plan, status)
            if status.job_class is JobClass.UNKNOWN:
                why = status.reason or "a state that its scheduler does not document"
                self.context.observer.notice(f"{run.plan.key}: job {run.job_id}: {status.state} ({why})")
        elif (status.reason, status.nodes) != (run.status.reason, run.status.nodes):
            self.context.journal.noticed(run.plan.key, run.number, status)
        if _is_held(status) and not _is_held(run.status):
            within = f"it will be cancelled unless it is released within {self.context.config.patience_s:g} s"
            why = status.reason or status.state
            self.context.observer.notice(f"{run.plan.key}: job {run.job_id} is held ({why}); {within}")
        is_ending = run.ending is not None or status.state == COMPLETING
        is_odd, is_unknown = is_ending or status.hopeless is not None, status.job_class is JobClass.UNKNOWN
        run.odd_since = (run.odd_since or time.monotonic()) if is_odd else None
        run.unknown_since = (run.unknown_since or time.monotonic()) if is_unknown else None
        run.status = status

    def _enforce(self, run: Tracked, now: float) -> JobStatus | None:
        """Return the status with which a job that hangs or can never start is to end; give up one of unknown state."""
        status, config = run.status, self.context.config
        if status is None or run.late_since is not None:
            return None
        odd_s = now - run.odd_since if run.odd_since is not None else 0.0
        if run.unknown_since is not None:  # one answer may have been cut
            if now - run.unknown_since > config.unknown_s:
                self._give_up(run, status, config.unknown_s)
        elif (run.ending is not None or status.state == COMPLETING) and odd_s > config.patience_s:
            self._give_up(run, status, config.patience_s)
        elif run.ending is not None:
            return None
        elif status.hopeless is not None and odd_s > (
            config.patience_s
            if _is_held(status) or (odd_s > HOPELESS_S and self._may_start(run, status))
            else HOPELESS_S
        ):
            excess = self.context.scheduler.exceeded(run.plan, status)
            reason = f"the scheduler will never start it: {status.reason or status.state}"
            reason += f"; it requests {excess}" if excess else ""
            return JobStatus("REFUSED", status.hopeless, reason=reason)
        elif run.plan.is_pre_test and now - run.submitted_at > config.pre_test_timeout_s:
            reason = f"it did not end in {config.pre_test_timeout_s:g} s"
            return JobStatus("PRE_TEST_TIMEOUT", JobClass.FAILED, reason=reason)
        elif status.state != RUNNING:
            self._progress.forget(run.plan)
        elif why := self.submitter.why_end(run.plan, partial(self._progress.step_times, run.plan, run.token or None)):
            return JobStatus(ENDED_EARLY, JobClass.CANCELLED, reason=why)
        elif run.plan.hang_timeout_s is not None:
            idle_s, step = self._progress.idle_s(run.plan, run.token or None)
            if idle_s > run.plan.hang_timeout_s:
                return JobStatus("HUNG", JobClass.FAILED, reason=f"no step for {idle_s:.0f} s after step {step}")
        return None

    def _awaits_files(self, run: Tracked, status: JobStatus) -> bool:
        """Return whether judging an ended job has to wait: a shared file system may show its files seconds later."""
        context = self.context
        if not self._may_be_late or context.stop is not None or run.ending is not None:
            return False
        if not (missing := self._progress.missing_files(run.plan, run.token or None, status)):
            return False
        if run.late_since is None:
            run.late_since = time.monotonic()
            text = f"job {run.job_id} has ended, and {missing}; waiting for its files"
            context.observer.notice(f"{run.plan.key}: {text} for up to {context.config.late_files_s:g} s")
        return time.monotonic() - run.late_since <= context.config.late_files_s

    def _may_start(self, run: Tracked, status: JobStatus) -> bool:
        """Return whether nodes that come back would start a job; True if the scheduler does not answer."""
        try:
            return self.context.scheduler.may_start(run.plan, status)
        except ToolFailure:
            return True  # queried again

    def _give_up(self, run: Tracked, status: JobStatus, after_s: float) -> None:
        """Give up a job whose state stays unknown; a job that never started may be submitted again.

        Paused: it was cancelled for an interrupt, after which it would be submitted again, and it still runs.
        """
        if status.state == NEVER_STARTED and (holder := self.context.withdraw(run)) is not None:
            if holder != run.job_id:
                self.context.adopt(run, holder)  # it starts this very moment
                return
            status = replace(status, state=FORGOTTEN)
        is_interrupted = run.ending is not None and run.ending.state == INTERRUPTED.state
        if is_interrupted and status.state not in (NEVER_STARTED, FORGOTTEN, COMPLETING):
            raise self.context.pause(f"job {run.job_id} was cancelled but is still {status.state}")
        self.finalizer.cancel([run])
        text = f"job {run.job_id} is given up as {status.state} and may still run"
        self.context.observer.notice(f"{run.plan.key}: {text}")
        reason = f"{status.reason or status.state}; given up after {after_s:g} s"
        if status.state == NEVER_STARTED:
            status = JobStatus(LOST, JobClass.INFRASTRUCTURE, run_time_s=0.0)
        elif status.job_class is not JobClass.INFRASTRUCTURE:
            status = replace(status, job_class=JobClass.LOST)
        self.finalizer.record(run, replace(status, reason=reason))
        self.finalizer.conclude([run])

    def stop(self) -> None:
        """Cancel everything that has a job; waiting runs stay unsubmitted."""
        self.finalizer.stop(INTERRUPTED)
        self.finalizer.continue_stopping()
        self.submitter.cancel_strays(at_once=True)
        self._cancel_returned()

    def poll_while_stopping(self) -> None:
        """Poll the jobs that are ending, and cancel jobs whose submission turns out to have succeeded."""
        self.submitter.resolve_unsure()
        self.finalizer.continue_stopping()
        self.finalizer.conclude(())
        self.poll()
        if self.context.returned:
            self._cancel_returned()

    def _cancel_returned(self) -> None:
        """Cancel jobs that were given up and that the scheduler has again. Their verdicts stay."""
        context, now = self.context, time.monotonic()
        lost = context.lost()
        if not lost or now < self._ask_for_lost_after:
            return
        self._ask_for_lost_after = now + _ASK_FOR_LOST_S
        self._stopping_since = self._stopping_since or now
        try:
            seen = context.scheduler.poll(context.jobs(lost))
            running = [run for run in lost if seen[run.plan.key].status.job_class is JobClass.ACTIVE]
            if running:
                context.scheduler.cancel(context.jobs(running))
        except ToolFailure as error:
            context.returned = [run.job_id for run in lost]  # assumed, without an answer
            context.tolerate(error)
            return
        context.answered()
        if running and not context.returned:
            names = ", ".join(seen[run.plan.key].job_id for run in running)
            context.observer.notice(f"cancelling {names}: given up earlier, but running")
        context.returned = [seen[run.plan.key].job_id for run in running]
        if running and now - self._stopping_since > context.config.patience_s:
            raise context.pause("jobs that were given up are still running")


def _is_held(status: JobStatus | None) -> bool:
    return status is not None and status.hopeless is JobClass.CANCELLED
