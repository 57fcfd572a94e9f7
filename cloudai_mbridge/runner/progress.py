"""Progress of running jobs: whether they still make steps, read from the growth of their logs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.files.regular import open_regular, read_chunks
from cloudai_mbridge.logs import LogParser, StepRecord
from cloudai_mbridge.plan import RunPlan


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
        log = self._logs.setdefault(run.key, _LogProgress(self._now(), _parser(run, token)))
        self._read(log, run, token)
        steps = log.parser.num_steps
        if steps != log.num_steps:
            log.num_steps, log.since = steps, self._now()
        return self._now() - log.since, log.parser.last_step

    def step_times(self, run: RunPlan, token: str | None = None) -> list[float]:
        """Return the seconds of all steps after the warm-up so far, without untimed steps. token: as above."""
        steps = self.steps(run, token)
        return [step.step_time_s for step in steps if step.step > run.warmup_steps and step.step_time_s]

    def steps(self, run: RunPlan, token: str | None = None) -> tuple[StepRecord, ...]:
        """Return all steps so far. token: as above."""
        log = self._logs.setdefault(run.key, _LogProgress(self._now(), _parser(run, token)))
        self._read(log, run, token)
        return log.parser.summary().steps

    def forget(self, run: RunPlan) -> None:
        """Begin anew: the job has ended."""
        self._logs.pop(run.key, None)

    def _read(self, log: _LogProgress, run: RunPlan, token: str | None) -> None:
        try:
            with open_regular(self._root / run.key / run.launcher.log_name) as file:
                if file.seek(0, 2) < log.offset:  # truncated: the scheduler has started the job again
                    log.offset, log.parser = 0, _parser(run, token)
                file.seek(log.offset)
                for chunk in read_chunks(file):
                    log.parser.feed(chunk)
                    log.offset = file.tell()
        except OSError:
            return


def _parser(run: RunPlan, token: str | None) -> LogParser:
    return LogParser(token, has_records=run.launcher.has_records)
