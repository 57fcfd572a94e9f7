"""Bring every run of a plan to its end."""

import contextlib
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from cloudai_mbridge.errors import Damaged, MBridgeError, Paused, ToolFailure
from cloudai_mbridge.files.disk import free_space, is_disk_full, no_space_left
from cloudai_mbridge.plan import ROOT_FILES, ScenarioPlan
from cloudai_mbridge.runner.cancel_request import clear_cancel, is_cancel_requested
from cloudai_mbridge.runner.context import RunnerContext
from cloudai_mbridge.runner.interrupt import Insisted, Interrupted, Interrupts
from cloudai_mbridge.runner.journal.journal import Journal
from cloudai_mbridge.runner.journal.known import require_known, restore_tokens
from cloudai_mbridge.runner.lock import driver_lock, submit_lock
from cloudai_mbridge.runner.sweep import Sweep
from cloudai_mbridge.runner.tracked import Judge, Observer
from cloudai_mbridge.schedulers.interface import Scheduler


class Pace:
    """Intervals between `shortest` and `longest` seconds, with jitter, so that drivers do not march in step."""

    def __init__(self, shortest: float, longest: float, now: Callable[[], float] = time.monotonic) -> None:
        self._shortest, self._longest, self._now = min(shortest, longest), longest, now
        self._changed_at = now()

    def changed(self) -> None:
        """Take note that something was submitted, or has changed."""
        self._changed_at = self._now()

    def interval(self, look_s: float = 0.0) -> float:
        """Return how long to wait after a look that took `look_s`."""
        wanted = max((self._now() - self._changed_at) * _SHARE, look_s * _COST, self._shortest)
        return min(wanted, self._longest) * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311


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
) -> None:
    """Submit every run when its turn comes and watch it until it has ended. A failed run does not stop the others.

    What an earlier process began in the same directory is taken up where it stands; with `only_cancel`, to cancel it.
    has_lock: the caller holds the directory's `driver_lock`.

    Raises:
        InUse: another process drives the directory; nothing was written.
        Damaged: its journal is lost.
        Interrupted: a signal came, or `mbridge cancel`; the active jobs have been cancelled.
        Paused: the scheduler did not answer for too long.
        ToolFailure: the journal cannot be written. In all cases the message names the jobs that may still run.
    """
    lock = contextlib.nullcontext() if has_lock else driver_lock(root)
    with lock, contextlib.closing(_journal(root)) as journal:
        journal.goes_on()
        clear_cancel(root)  # what was asked of an earlier process
        with submit_lock(root) as keep_open, Interrupts() as interrupts:
            journal.plan(run.key for run in plan.runs)
            if only_cancel:
                interrupts.request(signal.SIGTERM)
            context = RunnerContext(plan, root, scheduler, journal, observer)
            restore_tokens(journal, context.log)
            require_known(root, journal.entries().values(), context.log)
            _drive(context, Sweep(context, judge, keep_open), pace, interrupts)


def _journal(root: Path) -> Journal:
    """Open or create the journal.

    Raises:
        BadInput: the file is not a journal.
        OSError: there is no space left for it.
    """
    path = root / ROOT_FILES.journal
    try:
        return Journal(path)
    except MBridgeError as error:
        if is_disk_full(error.__context__, path):
            raise no_space_left(path) from None
        raise


def _drive(context: RunnerContext, sweep: Sweep, pace: Pace, interrupts: Interrupts) -> None:
    try:
        sweep.restore()
        if context.lost():
            _check(context.root, interrupts)  # to cancel what runs after all, though no run is left to bring to its end
        while not context.is_over:
            _check(context.root, interrupts)
            _require_journal(context.root)
            sweep.submit_ready(interrupts)
            _require_journal(context.root)
            sweep.look()
            if context.has_changed:
                context.has_changed = False
                pace.changed()
            if not context.is_over:
                interrupts.sleep(pace.interval(sweep.poll_s), lambda: is_cancel_requested(context.root))
    except Interrupted as interrupted:
        _stop(context, sweep, interrupts, interrupted)
    except (ToolFailure, Damaged, OSError, sqlite3.Error) as error:
        raise ToolFailure(f"{error}{_space(error, context.root)}{_left(context)}") from None
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


def _space(error: Exception, root: Path) -> str:
    """Return how much space there is, if the lack of it may have been the error."""
    path = root / ROOT_FILES.journal
    if is_disk_full(error, path) or is_disk_full(error.__context__, path):
        return f" ({path}: {free_space(path)})"
    return ""


def _left(context: RunnerContext) -> str:
    jobs = ", ".join(context.may_still_run())
    return f"; may still run: {jobs}; continue with: mbridge resume {context.root}" if jobs else ""


def _check(root: Path, interrupts: Interrupts) -> None:
    """Raise Interrupted if a signal, or a request to cancel, has come."""
    if is_cancel_requested(root):
        clear_cancel(root)
        interrupts.request(signal.SIGTERM)
    interrupts.check()


def _stop(context: RunnerContext, sweep: Sweep, interrupts: Interrupts, interrupted: Interrupted) -> None:
    """Cancel everything and wait for it, until a second signal.

    Raises:
        Interrupted: always.
    """
    try:
        context.journal.stopped()
        sweep.stop()
        interrupts.cancelling()
        while context.may_still_run():
            sweep.look_while_stopping()
            time.sleep(_STOPPING_INTERVAL_S)
    except (ToolFailure, Damaged, OSError, sqlite3.Error) as error:
        with contextlib.suppress(ToolFailure):
            context.scheduler.cancel(context.jobs(context.active()))
        raise ToolFailure(f"{error}{_left(context)}") from None
    except (Insisted, Paused):
        raise Interrupted(interrupted.number, ", ".join(context.may_still_run())) from None
    raise interrupted


_SHARE = 0.1  # of the time since the last change: a change is noticed after at most a tenth more
_COST = 5.0  # a look that took long is a busy controller: wait at least so many times as long
_JITTER = 0.1
