"""Where a run stands, for readers. That no process holds it does not mean that its jobs have ended.

The journal has their states only until its last driver ended. From then on the scheduler knows them, or, if it does not
answer, the jobs' own files. Nothing is written, and a job without evidence of its end has not ended.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cloudai_mbridge.errors import MBridgeError
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.runner.finalizer import ended_as
from cloudai_mbridge.runner.journal import JournalEntry, read_entries
from cloudai_mbridge.runner.lock import changed_at
from cloudai_mbridge.schedulers.interface import RUNNING, Job, Scheduler, Seen
from cloudai_mbridge.schedulers.slurm.jobs import status_in_files


@dataclass(frozen=True)
class Observed:
    """State of a run at a time.

    held_by: the process that drives it, None if none does. at: when the states were so; None if unknown.
    is_open: some runs may have no verdict yet.
    jobs: by key of the run, those whose end is not in the journal. trouble: why the scheduler did not tell, else "".
    """

    held_by: str | None = None
    at: datetime | None = None
    jobs: Mapping[str, Seen] = field(default_factory=lambda: MappingProxyType({}))
    trouble: str = ""
    is_open: bool = True

    @property
    def as_of(self) -> str:
        """The time as text, "" if unknown; with the date unless it is less than a day ago."""
        if self.at is None:
            return ""
        is_recent = datetime.now(UTC) - self.at < timedelta(days=1)
        return f"as of {self.at.astimezone(UTC):{'%H:%M:%S' if is_recent else '%Y-%m-%d %H:%M:%S'}} UTC"

    @property
    def driver_text(self) -> str:
        """Which process holds the run, the time of the states, and why it is not now, as one text."""
        held = f"held by {self.held_by}" if self.held_by else "no running process holds this run"
        why = f" ({self.trouble})" if self.trouble else ""
        return f"{held}; {self.as_of}{why}" if self.as_of or why else held

    def applied_to(self, entries: Mapping[str, JournalEntry]) -> dict[str, JournalEntry]:
        """Return the journal's entries with the jobs as they were observed."""
        return {key: _applied(entry, self.jobs.get(key)) for key, entry in entries.items()}


def observe(
    root: Path, held_by: str | None, planned: Iterable[Mapping[str, Any]], ask: Callable[[], Scheduler]
) -> Observed:
    """Return where a run stands. held_by: as in `reading`, in whose context it is. planned: the plan's runs.

    ask: returns the scheduler; called if jobs have not ended according to the journal.
    MBridgeError: the journal cannot be read.
    """
    if held_by is not None:
        return Observed(held_by, journal_time(root, held_by))
    entries = read_entries(root)
    index_of = {run["key"]: run.get("array_index") or 0 for run in planned}
    jobs = [_job(root, entry, index_of[key]) for key, entry in entries.items() if key in index_of and is_left(entry)]
    if not jobs:
        is_open = not entries or any(entry.verdict is None for entry in entries.values())
        return Observed(at=journal_time(root, None), is_open=is_open)
    try:
        return Observed(at=datetime.now(UTC), jobs=ask().observe(jobs))
    except (MBridgeError, OSError) as error:
        found = {job.key: Seen(job.job_id, status) for job in jobs if (status := status_in_files(job)) is not None}
        return Observed(at=journal_time(root, None), jobs=found, trouble=str(error))


def journal_time(root: Path, held_by: str | None) -> datetime | None:
    """Return when the journal's states were so: its driver, if there is one, checks them without a change, too."""
    return changed_at(root / (ROOT_FILES.driver_lock if held_by else ROOT_FILES.journal))


def is_left(entry: JournalEntry) -> bool:
    """Return whether the journal's last driver has left a job without its end."""
    return entry.verdict is None and entry.last is not None and entry.last.ended_at is None


def _job(root: Path, entry: JournalEntry, array_index: int) -> Job:
    last = entry.last
    assert last is not None
    was_listed = last.status is not None and last.status.is_listed
    return Job(entry.key, last.job_id or "", last.token, root / entry.key, array_index, was_listed)


def _applied(entry: JournalEntry, seen: Seen | None) -> JournalEntry:
    if seen is None or entry.last is None or not is_left(entry):
        return entry
    last, status = entry.last, ended_as(seen.status, entry.last.ending)
    started_at = last.started_at
    if started_at is None and status.state == RUNNING and status.run_time_s is not None:
        started_at = (datetime.now(UTC) - timedelta(seconds=status.run_time_s)).isoformat(timespec="milliseconds")
    now = replace(last, job_id=seen.job_id or last.job_id, status=status, started_at=started_at)
    return replace(entry, attempts=(*entry.attempts[:-1], now))
