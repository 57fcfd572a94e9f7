"""Logs of jobs: whether a running job still makes steps, and whether the files of an ended one are complete."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.files.regular import open_regular, read_chunks
from cloudai_mbridge.launch.claim import LOST_CLAIM, NO_CLAIM
from cloudai_mbridge.logs import SKIPPED, LogParser, StepRecord
from cloudai_mbridge.metrics import counted_steps, first_step, missing_steps
from cloudai_mbridge.models.test_definition import last_warmup_step
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.schedulers.interface import NEVER_BEGAN, NOT_LAUNCHED, JobClass, JobStatus


@dataclass
class _LogProgress:
    since: float
    parser: LogParser
    offset: int = 0
    num_steps: int = 0


class Progress:
    """The logs of running jobs, by run key."""

    def __init__(self, root: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._root, self._now = root, now
        self._logs: dict[str, _LogProgress] = {}

    def idle_s(self, run: RunPlan, token: str | None = None) -> tuple[float, int]:
        """Return the seconds since a running job's last step, or since the first call, and the number of that step.

        token: of the job; None if unknown.
        """
        log = self._read(run, token)
        steps = log.parser.num_steps
        if steps != log.num_steps:
            log.num_steps, log.since = steps, self._now()
        return self._now() - log.since, log.parser.last_step

    def step_times(self, run: RunPlan, token: str | None = None) -> list[float]:
        """Return the seconds of all steps after the warm-up so far, without untimed steps. token: as above."""
        counted = counted_steps(self.steps(run, token), self.last_warmup(run, token))
        return [step.step_time_s for step in counted if step.step_time_s]

    def last_warmup(self, run: RunPlan, token: str | None = None) -> int:
        """Return the last step of the warm-up, which begins behind a loaded checkpoint. token: as above."""
        log = self._read(run, token).parser.summary()
        return last_warmup_step(first_step(log.run, log.steps), run.warmup_steps, run.num_steps, run.definition)

    def steps(self, run: RunPlan, token: str | None = None) -> tuple[StepRecord, ...]:
        """Return all steps so far. token: as above."""
        return self._read(run, token).parser.summary().steps

    def forget(self, run: RunPlan) -> None:
        """Begin anew: the job has ended."""
        self._logs.pop(run.key, None)

    def _read(self, run: RunPlan, token: str | None) -> _LogProgress:
        log = self._logs.setdefault(run.key, _LogProgress(self._now(), _parser(run, token)))
        with contextlib.suppress(OSError), open_regular(self._root / run.key / run.launcher.log_name) as file:
            if file.seek(0, 2) < log.offset:  # truncated: the scheduler has started the job again
                log.offset, log.parser = 0, _parser(run, token)
            file.seek(log.offset)
            for chunk in read_chunks(file):
                log.parser.feed(chunk)
                log.offset = file.tell()
        return log

    def missing_files(self, run: RunPlan, token: str | None, status: JobStatus) -> str:
        """Return the missing output of an ended job, "" if complete: the steps of a good job, the end of another.

        A job that was killed, or whose script has not begun, leaves no exit code. That it has not begun is inferred
        from files that may be late, too, unless Slurm or the script's own exit code proves it.
        """
        if status.job_class is JobClass.SUCCEEDED:
            log = self._read(run, token).parser.summary()
            steps = log.steps
            if reasons := missing_steps(steps, run.num_steps or 1, first_step(log.run, steps) if run.num_steps else 1):
                return reasons[0]
            done = [step for step in steps if step.left_out != SKIPPED]
            is_late = any(step.loss is not None for step in done) and done[-1].loss is None
            return f"step {done[-1].step} has no loss" if is_late else ""
        if NEVER_BEGAN in status.reason:
            is_proven = status.signal == NOT_LAUNCHED or status.exit_code == NO_CLAIM
            return "" if is_proven else "its start mark is missing"
        has_exited = status.job_class is JobClass.FAILED and status.exit_code and not status.signal
        if not has_exited or status.exit_code == LOST_CLAIM:
            return ""
        directory = self._root / run.key
        has_begun = (directory / POINT_FILES.started).exists()
        is_missing = has_begun and not (directory / POINT_FILES.exit_code).exists()
        return f"{POINT_FILES.exit_code} is missing" if is_missing else ""


def _parser(run: RunPlan, token: str | None) -> LogParser:
    return LogParser(token, has_records=run.launcher.has_records)
