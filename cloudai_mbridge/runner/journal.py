"""The truth about what was submitted and how it ended: one SQLite file in the root of a run."""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cloudai_mbridge.jobs import JobClass, JobStatus

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    job_id TEXT,
    state TEXT,
    job_class TEXT,
    exit_code INTEGER,
    signal INTEGER,
    reason TEXT NOT NULL DEFAULT '',
    nodes TEXT NOT NULL DEFAULT '',
    submitted_at TEXT,
    ended_at TEXT
) STRICT
"""


@dataclass(frozen=True)
class JournalEntry:
    """What is known of one run. status is None until the scheduler was asked."""

    key: str
    job_id: str | None
    status: JobStatus | None
    submitted_at: str | None
    ended_at: str | None


class Journal:
    """Every change is on disk when the method returns."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)

    def plan(self, keys: Iterable[str]) -> None:
        """Write down what is going to be submitted."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO runs (key) VALUES (?)", [(key,) for key in keys])
        self._db.execute("COMMIT")

    def submitted(self, key: str, job_id: str) -> None:
        self._db.execute("UPDATE runs SET job_id = ?, submitted_at = ? WHERE key = ?", (job_id, _now(), key))

    def saw(self, key: str, status: JobStatus) -> None:
        """Write down a status; a final one also gets the time."""
        values = (status.state, status.job_class, status.exit_code, status.signal, status.reason, status.nodes)
        ended_at = _now() if status.is_final else None
        self._db.execute(
            "UPDATE runs SET state = ?, job_class = ?, exit_code = ?, signal = ?, reason = ?, nodes = ?, ended_at = ?"
            " WHERE key = ?",
            (*values, ended_at, key),
        )

    def entries(self) -> dict[str, JournalEntry]:
        """Return all runs by key."""
        rows = self._db.execute(
            "SELECT key, job_id, state, job_class, exit_code, signal, reason, nodes, submitted_at, ended_at FROM runs"
        )
        return {row[0]: _entry(row) for row in rows}

    def close(self) -> None:
        self._db.close()


def _entry(row: tuple[str, ...]) -> JournalEntry:
    key, job_id, state, job_class, exit_code, signal, reason, nodes, submitted_at, ended_at = row
    status = None
    if state is not None:
        status = JobStatus(state, JobClass(job_class), exit_code, signal, reason, nodes)  # type: ignore[arg-type]
    return JournalEntry(key, job_id, status, submitted_at, ended_at)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
