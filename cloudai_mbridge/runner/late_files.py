"""Files of a job that has ended: a shared file system may show them seconds after the scheduler reports the end."""

import time

from cloudai_mbridge.launch.claim import LOST_CLAIM, NO_CLAIM
from cloudai_mbridge.metrics import missing_steps
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.runner.context import RunnerContext, Tracked
from cloudai_mbridge.runner.progress import Progress
from cloudai_mbridge.schedulers.interface import NEVER_BEGAN, NOT_LAUNCHED, JobClass, JobStatus


class LateFiles:
    """Waits for the files of each ended job, `runner.late_files_s` at most, while the other runs continue."""

    def __init__(self, context: RunnerContext, progress: Progress, *, may_be_late: bool) -> None:
        """may_be_late: set if jobs write on other machines."""
        self._context, self._progress, self._may_be_late = context, progress, may_be_late

    def are_awaited(self, run: Tracked, status: JobStatus) -> bool:
        """Return whether judging a job that has ended with `status` has to wait."""
        context = self._context
        if not self._may_be_late or context.stop is not None or run.ending is not None:
            return False
        if not (missing := self._missing(run, status)):
            return False
        if run.late_since is None:
            run.late_since = time.monotonic()
            text = f"job {run.job_id} has ended, and {missing}; waiting for its files"
            context.observer.notice(f"{run.plan.key}: {text} for up to {context.config.late_files_s:g} s")
        return time.monotonic() - run.late_since <= context.config.late_files_s

    def _missing(self, run: Tracked, status: JobStatus) -> str:
        """Return the missing output of an ended job, "" if complete: the steps of a good job, the end of another.

        A job that was killed, or whose script has not begun, leaves no exit code. That it has not begun is inferred
        from files that may be late, too, unless Slurm or the script's own exit code proves it.
        """
        if status.job_class is JobClass.SUCCEEDED:
            return self._missing_steps(run)
        if NEVER_BEGAN in status.reason:
            is_proven = status.signal == NOT_LAUNCHED or status.exit_code == NO_CLAIM
            return "" if is_proven else "its start mark is missing"
        has_exited = status.job_class is JobClass.FAILED and status.exit_code and not status.signal
        if not has_exited or status.exit_code == LOST_CLAIM:
            return ""
        directory = self._context.root / run.plan.key
        has_begun = (directory / POINT_FILES.started).exists()
        is_missing = has_begun and not (directory / POINT_FILES.exit_code).exists()
        return f"{POINT_FILES.exit_code} is missing" if is_missing else ""

    def _missing_steps(self, run: Tracked) -> str:
        steps = self._progress.steps(run.plan, run.token or None)
        if reasons := missing_steps(steps, run.plan.num_steps or 1):
            return reasons[0]
        has_losses = any(step.loss is not None for step in steps)
        last = steps[-1]
        return f"step {last.step} has no loss" if has_losses and last.loss is None else ""
