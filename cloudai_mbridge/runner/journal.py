"""The truth about what was submitted and how it ended: one SQLite file in the root of a run.

A run has attempts, numbered from 1: each is a job of its own. An attempt is written down before it is submitted, with
the token that its job will carry, and the job's id as soon as it is known; in between lies a moment in which only the
scheduler knows. Every method that changes something has it on disk when it returns.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.jobs import JobClass, JobStatus

# How long another process may hold the file; `mbridge status` holds it for milliseconds.
_BUSY_TIMEOUT_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY,
    verdict TEXT,
    reasons TEXT NOT NULL DEFAULT '[]',
    note TEXT NOT NULL DEFAULT '',
    decided_at TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS attempts (
    key TEXT NOT NULL REFERENCES runs,
    number INTEGER NOT NULL,
    token TEXT NOT NULL,
    intended_at TEXT NOT NULL,
    job_id TEXT,
    submitted_at TEXT,
    started_at TEXT,
    ended_at TEXT,
    status TEXT,
    ending TEXT,
    failure TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (key, number)
) STRICT;
CREATE TABLE IF NOT EXISTS nodes (name TEXT PRIMARY KEY, reason TEXT NOT NULL, at TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS events (at TEXT NOT NULL, key TEXT, text TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""
_CANCEL = "cancel_requested_at"


@dataclass(frozen=True)
class Attempt:
    """One job of a run. status is None until the scheduler was asked.

    ending: what the attempt counts as once it has ended, if the runner ended it. failure: the id of what made it fail.
    """

    number: int
    token: str
    job_id: str | None
    status: JobStatus | None
    ending: JobStatus | None
    submitted_at: str | None
    started_at: str | None
    ended_at: str | None
    failure: str


@dataclass(frozen=True)
class JournalEntry:
    """What is known of one run. verdict is None until the run has ended for good. note: why it was not tried again."""

    key: str
    verdict: str | None
    reasons: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    note: str = ""

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True)
class Event:
    """Something that happened, with the run that it happened to, if any."""

    at: str
    key: str | None
    text: str


class Journal:
    """Open, or create, the journal of a run."""

    def __init__(self, path: Path) -> None:
        """Raise BadInput if the file is no journal."""
        self._depth = 0
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
        except sqlite3.Error as error:
            raise BadInput(f"{path}: cannot be opened ({error})") from None
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise BadInput(f"{path}: is no journal of a run ({error})") from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything inside at once, or nothing of it.

        Raises:
            ToolFailure: the file cannot be written.
        """
        if self._depth:
            yield
            return
        self._depth += 1
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise ToolFailure(f"the journal cannot be written: {error}") from None
        finally:
            self._depth -= 1

    def plan(self, keys: Iterable[str]) -> None:
        """Write down the runs; ones that are there stay as they are."""
        with self.transaction():
            self._db.executemany("INSERT OR IGNORE INTO runs (key) VALUES (?)", [(key,) for key in keys])

    def intend(self, attempts: Iterable[tuple[str, int]], token: str) -> None:
        """Write down, before a submission, which attempts (key, number) it holds."""
        now = _now()
        with self.transaction():
            for key, number in attempts:
                self._db.execute(
                    "INSERT INTO attempts (key, number, token, intended_at) VALUES (?, ?, ?, ?)",
                    (key, number, token, now),
                )
                self._event(key, f"attempt {number}: submitting as {token}")

    def forget(self, key: str, number: int, why: str) -> None:
        """Take back an attempt of which it is certain that nothing was submitted."""
        with self.transaction():
            self._db.execute("DELETE FROM attempts WHERE key = ? AND number = ?", (key, number))
            self._event(key, f"attempt {number}: not submitted: {why}")

    def submitted(self, key: str, number: int, job_id: str) -> None:
        """Write down an attempt's job."""
        with self.transaction():
            self._set(key, number, job_id=job_id, submitted_at=_now())
            self._event(key, f"attempt {number}: job {job_id}")

    def saw(self, key: str, number: int, status: JobStatus) -> None:
        """Write down a status; the first one that runs and the final one also get the time."""
        with self.transaction():
            self._set(key, number, status=_dump(status))
            if status.state != "PENDING" and (not status.is_final or status.run_time_s):
                self._db.execute(
                    "UPDATE attempts SET started_at = ? WHERE key = ? AND number = ? AND started_at IS NULL",
                    (_now(), key, number),
                )
            if status.is_final:
                self._set(key, number, ended_at=_now())
            self._event(key, f"attempt {number}: {status.state}" + (f" ({status.reason})" if status.reason else ""))

    def noticed(self, key: str, number: int, status: JobStatus) -> None:
        """Write down why a job waits, which changes often and is no event."""
        with self.transaction():
            self._set(key, number, status=_dump(status))

    def ending(self, key: str, number: int, status: JobStatus) -> None:
        """Write down, before its job is cancelled, what the attempt will count as."""
        with self.transaction():
            self._set(key, number, ending=_dump(status))
            self._event(key, f"attempt {number}: cancelling as {status.state} ({status.reason})")

    def failed(self, key: str, number: int, failure: str) -> None:
        """Write down what made an attempt fail."""
        with self.transaction():
            self._set(key, number, failure=failure)

    def decided(self, key: str, verdict: str, reasons: Iterable[str], note: str = "") -> None:
        """Write down a run's verdict; it has ended for good."""
        with self.transaction():
            self._db.execute(
                "UPDATE runs SET verdict = ?, reasons = ?, note = ?, decided_at = ? WHERE key = ?",
                (verdict, json.dumps(list(reasons)), note, _now(), key),
            )
            self._event(key, f"verdict: {verdict}")

    def reopen(self, key: str) -> None:
        """Take back the verdict of a run that is to be tried again."""
        with self.transaction():
            self._db.execute(
                "UPDATE runs SET verdict = NULL, reasons = '[]', note = '', decided_at = NULL WHERE key = ?", (key,)
            )
            self._event(key, "taken up again")

    def exclude(self, node: str, reason: str) -> None:
        """Write down a node that no further job shall use."""
        with self.transaction():
            self._db.execute("INSERT OR IGNORE INTO nodes VALUES (?, ?, ?)", (node, reason, _now()))
            self._event(None, f"node {node} excluded: {reason}")

    def note(self, text: str) -> None:
        """Write down what concerns no single run."""
        with self.transaction():
            self._event(None, text)

    def request_cancel(self) -> None:
        """Ask the driver to cancel everything and end."""
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_CANCEL, _now()))

    def clear_cancel(self) -> None:
        """Take back `request_cancel`."""
        with self.transaction():
            self._db.execute("DELETE FROM facts WHERE name = ?", (_CANCEL,))

    def is_cancel_requested(self) -> bool:
        return self._db.execute("SELECT 1 FROM facts WHERE name = ?", (_CANCEL,)).fetchone() is not None

    def entry(self, key: str) -> JournalEntry:
        """Return one run."""
        return self.entries(key)[key]

    def entries(self, key: str | None = None) -> dict[str, JournalEntry]:
        """Return all runs by key, or only the one of a key."""
        attempts: dict[str, list[Attempt]] = {}
        for row in self._db.execute(
            "SELECT key, number, token, job_id, status, ending, submitted_at, started_at, ended_at, failure"
            " FROM attempts WHERE ?1 IS NULL OR key = ?1 ORDER BY key, number",
            (key,),
        ):
            run_key, number, token, job_id, status, ending, *rest = row
            attempt = Attempt(number, token, job_id, _load(status), _load(ending), *rest)
            attempts.setdefault(run_key, []).append(attempt)
        return {
            run_key: JournalEntry(run_key, verdict, tuple(json.loads(reasons)), tuple(attempts.get(run_key, ())), note)
            for run_key, verdict, reasons, note in self._db.execute(
                "SELECT key, verdict, reasons, note FROM runs WHERE ?1 IS NULL OR key = ?1 ORDER BY rowid", (key,)
            )
        }

    def excluded(self) -> dict[str, str]:
        """Return the excluded nodes with the reasons."""
        return dict(self._db.execute("SELECT name, reason FROM nodes ORDER BY at, name").fetchall())

    def events(self) -> list[Event]:
        """Return everything that happened, in order."""
        return [Event(*row) for row in self._db.execute("SELECT at, key, text FROM events ORDER BY rowid")]

    def close(self) -> None:
        self._db.close()

    def _set(self, key: str, number: int, **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(
            f"UPDATE attempts SET {names} WHERE key = ? AND number = ?",  # noqa: S608 - the names are this file's
            (*values.values(), key, number),
        )

    def _event(self, key: str | None, text: str) -> None:
        self._db.execute("INSERT INTO events VALUES (?, ?, ?)", (_now(), key, text))


def _dump(status: JobStatus) -> str:
    return json.dumps(asdict(status))


def _load(text: str | None) -> JobStatus | None:
    if text is None:
        return None
    data = json.loads(text)
    return JobStatus(**{**data, "job_class": JobClass(data["job_class"])})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
