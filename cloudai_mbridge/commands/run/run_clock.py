"""Where the runs of a scenario are, since when, and how long the rest may take."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean, median

from cloudai_mbridge.models.values.time_limit import format_time_limit
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.runner.journal.rows import UNTRIED, Attempt, JournalEntry
from cloudai_mbridge.schedulers.interface import SUBMITTED, JobClass, JobStatus
from cloudai_mbridge.verdict import Verdict

_GROUPS = {
    **{JobClass.SUCCEEDED: "done", JobClass.STOPPED: "done"},
    **{JobClass.CANCELLED: "cancelled", JobClass.SKIPPED: "skipped"},
}
_SKIPPED = JobStatus("SKIPPED", JobClass.SKIPPED)
_ORDER = ("done", "failed", "running", "pending", "waiting")


@dataclass
class RunRow:
    """A run. since: when its state began; used_s: run time of its ended attempts."""

    run: RunPlan
    status: JobStatus | None = None
    verdict: str = ""
    since: float = 0.0
    used_s: float = 0.0

    @property
    def group(self) -> str:
        """Where it is counted."""
        if self.status is None:
            return "waiting"
        if not self.status.is_final:
            return "pending" if self.status.state == "PENDING" else "running"
        if self.verdict:
            return "done" if self.verdict == Verdict.SUCCESS else self.verdict
        return _GROUPS.get(self.status.job_class, "failed")

    @property
    def is_counted(self) -> bool:
        """A search leaves most of its points out."""
        return self.run.search is None or self.status is not None


@dataclass
class RunClock:
    """What is known of all runs: who is where, since when, and how long the rest may take.

    started_at: when the whole began. Times are seconds of `time.time`.
    """

    plan: ScenarioPlan
    started_at: float = field(default_factory=time.time)
    rows: dict[str, RunRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {run.key: RunRow(run) for run in self.plan.runs}

    def catch_up(self, entries: Mapping[str, JournalEntry]) -> None:
        """Take over what the journal knows."""
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
            row.used_s = sum(_used_s(attempt) for attempt in entry.attempts)
            at = (last.ended_at if row.status.is_final else last.started_at) if last else None
            row.since = _seconds(at) if at else row.since or time.time()

    def saw(self, run: RunPlan, status: JobStatus, at: float | None = None) -> None:
        """Note a run's state. at: since when it has it; default: now."""
        row, at = self.rows[run.key], time.time() if at is None else at
        if status.is_final and not (row.status and row.status.is_final):
            row.used_s += status.run_time_s if status.run_time_s is not None else self._running_s(row, at)
        if row.status is None or row.status.state != status.state:
            row.since = at
        row.status, row.verdict = status, ""

    def decided(self, run: RunPlan, verdict: str) -> None:
        self.rows[run.key].verdict = verdict

    @property
    def counts(self) -> Counter[str]:
        return Counter(row.group for row in self.rows.values() if row.is_counted)

    @property
    def ended_at(self) -> float | None:
        """When the last run ended, None while one has not."""
        rows = [row for row in self.rows.values() if row.is_counted]
        if not all(row.status and row.status.is_final for row in rows):
            return None
        return max((row.since for row in rows if row.status != _SKIPPED), default=None)

    def gpu_hours(self, now: float) -> float:
        seconds = ((row.used_s + self._running_s(row, now)) * row.run.world_size for row in self.rows.values())
        return sum(seconds) / 3600

    def left_s(self, now: float, steps: Mapping[str, tuple[int, float]]) -> float | None:
        """Return about how long the rest takes, None if there is nothing to tell from, or a search decides.

        steps: of running runs, by key: the last step, and the seconds of one. What was predicted is corrected by what
        has run; without predictions, runs are taken to last as long as those that have ended.
        """
        if any(run.search is not None for run in self.plan.runs):
            return None
        ended = [row for row in self.rows.values() if row.group == "done" and row.used_s]
        ratios = [row.used_s / expected for row in ended if (expected := _predicted_s(row.run))]
        left = []
        for row in self.rows.values():
            if row.status and row.status.is_final:
                continue
            expected = _predicted_s(row.run)
            if expected is not None and ratios:
                expected *= median(ratios)
            elif ended:
                expected = fmean(each.used_s for each in ended)
            done, step_s = steps.get(row.run.key, (0, 0.0))
            if done and row.run.num_steps:
                left.append(max(0.0, (row.run.num_steps - done) * step_s))
            elif expected is None:
                return None
            else:
                left.append(max(0.0, expected - self._running_s(row, now)))
        at_once = max(1, self.counts["running"])
        return max(max(left, default=0.0), sum(left) / at_once)

    @staticmethod
    def _running_s(row: RunRow, now: float) -> float:
        return max(0.0, now - row.since) if row.group == "running" else 0.0


def _used_s(attempt: Attempt) -> float:
    """Return how long an attempt has run, 0 while it does."""
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
    return step_s * run.num_steps if step_s and run.num_steps else None


def counts_text(clock: RunClock) -> str:
    """Say in a line where the runs are."""
    counts = clock.counts
    return ", ".join(f"{counts[group]} {group}" for group in (*_ORDER, *sorted({*counts} - {*_ORDER})) if counts[group])


def time_text(clock: RunClock, now: float, steps: Mapping[str, tuple[int, float]]) -> str:
    """Say how long the run has taken, and how long the rest may take. steps: as in `RunClock.left_s`."""
    now = clock.ended_at or now
    left = clock.left_s(now, steps) if clock.counts["running"] + clock.counts["waiting"] else None
    more = f", about {format_time_limit(left)} left" if left and left >= 1 else ""
    return f"{format_time_limit(max(0.0, now - clock.started_at))} elapsed{more}"
