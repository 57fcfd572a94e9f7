"""The two records of submissions: the journal, with their results, and the log of submissions.

The journal is the authoritative record: one SQLite file in the root of a run. A run has attempts, numbered from 1: each
is a job of its own. An attempt is recorded before it is submitted, with the token that its job will carry, and the job
id as soon as the scheduler returns it; in between, only the scheduler has the id. Every method that changes something
has it on disk when it returns.

The journal contains more, but it is a single file that a copy, a full disk or a user can remove while its jobs run. The
log has a line for each submission, on disk before it, with which the jobs are found if the journal is lost.
"""

import contextlib
import json
import os
import socket
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.launch.claim import SIXTEEN_HEX
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.runner.journal_file import Attempt, JournalEntry, open_journal, open_read_only, read_entry, reading
from cloudai_mbridge.schedulers.interface import PENDING, JobStatus

__all__ = ["Attempt", "Event", "Journal", "JournalEntry"]

# How long another process may hold the file; `mbridge status` holds it for milliseconds.
_BUSY_TIMEOUT_S = 30.0
_STOPPED = "stopped_at"
_MOST_ATTEMPTS = 1 << 31


@dataclass(frozen=True)
class Event:
    """Something that happened, with the run that it happened to, if any."""

    at: str
    key: str | None
    text: str


class Journal:
    """Open, or create, the journal of a run, to write it."""

    def __init__(self, path: Path) -> None:
        """Raise OtherVersion, Damaged or ToolFailure as `open_journal`."""
        self._depth = 0
        self._path, self._db = path, open_journal(path, _BUSY_TIMEOUT_S)

    @classmethod
    @contextlib.contextmanager
    def read_only(cls, path: Path) -> Iterator[Self]:
        """Open a journal to read it, and write nothing; raise as `open_read_only`."""
        with open_read_only(path) as db:
            journal = cls.__new__(cls)
            journal._depth, journal._path, journal._db = 0, path, db
            yield journal

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything inside at once, or nothing of it; raise ToolFailure if the file cannot be written."""
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
        except sqlite3.DatabaseError as error:
            raise ToolFailure(f"the journal cannot be written: {error} ({self._path})") from None
        finally:
            self._depth -= 1

    def plan(self, keys: Iterable[str]) -> None:
        """Record the runs; existing runs stay unchanged."""
        with self.transaction():
            self._db.executemany("INSERT OR IGNORE INTO runs (key) VALUES (?)", [(key,) for key in keys])

    def intend(self, attempts: Iterable[tuple[str, int]], token: str) -> None:
        """Record, before a submission, the attempts (key, number) that it contains."""
        now = _now()
        with self.transaction():
            for key, number in attempts:
                self._db.execute(
                    "INSERT INTO attempts (key, number, token, intended_at) VALUES (?, ?, ?, ?)",
                    (key, number, token, now),
                )
                self._event(key, f"attempt {number}: submitting as {token}")

    def forget(self, key: str, number: int, why: str) -> None:
        """Remove an attempt for which certainly nothing was submitted."""
        with self.transaction():
            self._db.execute("DELETE FROM attempts WHERE key = ? AND number = ?", (key, number))
            self._event(key, f"attempt {number}: not submitted: {why}")

    def submitted(self, key: str, number: int, job_id: str) -> None:
        """Record an attempt's job."""
        with self.transaction():
            self._set(key, number, job_id=job_id, submitted_at=_now())
            self._event(key, f"attempt {number}: job {job_id}")

    def tokens(self) -> list[tuple[str, int, str]]:
        """Return key, number and token of every attempt, as they are in the file."""
        return [(key, number, token) for key, number, token in self._all("SELECT key, number, token FROM attempts")]

    def retoken(self, key: str, number: int, token: str) -> None:
        """Replace a damaged token."""
        with self.transaction():
            self._set(key, number, token=token)
            self._event(key, f"attempt {number}: submitted as {token}; the journal had another token")

    def saw(self, key: str, number: int, status: JobStatus) -> None:
        """Record a status; the first running status and the final status also get the time."""
        with self.transaction():
            self._set(key, number, status=_dump(status))
            if status.state != PENDING and (not status.is_final or status.run_time_s):
                self._db.execute(
                    "UPDATE attempts SET started_at = ? WHERE key = ? AND number = ? AND started_at IS NULL",
                    (_now(), key, number),
                )
            if status.is_final:
                self._set(key, number, ended_at=_now())
            self._event(key, f"attempt {number}: {status.state}" + (f" ({status.reason})" if status.reason else ""))

    def noticed(self, key: str, number: int, status: JobStatus) -> None:
        """Record why a job waits, which changes often and is not an event."""
        with self.transaction():
            self._set(key, number, status=_dump(status))

    def ending(self, key: str, number: int, status: JobStatus) -> None:
        """Record, before its job is cancelled, the status with which the attempt will end."""
        with self.transaction():
            self._set(key, number, ending=_dump(status))
            self._event(key, f"attempt {number}: cancelling as {status.state} ({status.reason})")

    def failed(self, key: str, number: int, failure: str) -> None:
        """Record the cause of an attempt's failure."""
        with self.transaction():
            self._set(key, number, failure=failure)

    def decided(self, key: str, verdict: str, reasons: Iterable[str], note: str = "") -> None:
        """Record a run's verdict; it has ended for good."""
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
        """Record a node that is excluded from further jobs."""
        with self.transaction():
            self._db.execute("INSERT OR IGNORE INTO nodes VALUES (?, ?, ?)", (node, reason, _now()))
            self._event(None, f"node {node} excluded: {reason}")

    def readmit(self, node: str, why: str) -> None:
        """Take back that a node is excluded."""
        with self.transaction():
            self._db.execute("DELETE FROM nodes WHERE name = ?", (node,))
            self._event(None, f"node {node} is used again: {why}")

    def note(self, text: str) -> None:
        """Record an event that concerns no single run."""
        with self.transaction():
            self._event(None, text)

    def stopped(self) -> None:
        """Record that mbridge was stopped: the remaining runs were not to be submitted."""
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_STOPPED, _now()))

    def goes_on(self) -> None:
        """Take back `stopped`."""
        with self.transaction():
            self._db.execute("DELETE FROM facts WHERE name = ?", (_STOPPED,))

    def was_stopped(self) -> bool:
        """Return whether the last process that held the run was stopped."""
        return bool(self._all("SELECT 1 FROM facts WHERE name = ?", _STOPPED))

    def entry(self, key: str) -> JournalEntry:
        """Return one run."""
        return self.entries(key)[key]

    def entries(self, key: str | None = None) -> dict[str, JournalEntry]:
        """Return all runs by key, or only the one of a key."""
        attempts: dict[str, list[list[Any]]] = {}
        which, values = ("", ()) if key is None else (" WHERE key = ?", (key,))  # by the index: there may be thousands
        for run_key, *row in self._all(
            "SELECT key, number, token, job_id, status, ending, submitted_at, started_at, ended_at, failure"  # noqa: S608
            f" FROM attempts{which} ORDER BY key, number",
            *values,
        ):
            attempts.setdefault(run_key, []).append(row)
        rows = self._all(f"SELECT key, verdict, reasons, note FROM runs{which} ORDER BY rowid", *values)  # noqa: S608
        return {row[0]: read_entry(row, attempts.get(row[0], ())) for row in rows}

    def excluded(self) -> dict[str, str]:
        """Return the excluded nodes with the reasons."""
        return {str(name): str(why) for name, why in self._all("SELECT name, reason FROM nodes ORDER BY at, name")}

    def events(self) -> list[Event]:
        """Return everything that happened, in order."""
        rows = self._all("SELECT at, key, text FROM events ORDER BY rowid")
        return [Event(str(at), None if key is None else str(key), str(text)) for at, key, text in rows]

    def close(self) -> None:
        self._db.close()

    def _all(self, query: str, *values: str | None) -> list[tuple[Any, ...]]:
        """Return all rows: a journal that is being created has no tables, and so no rows."""
        with reading(self._path):
            if not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                return []
            return self._db.execute(query, values).fetchall()

    def _set(self, key: str, number: int, **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(
            f"UPDATE attempts SET {names} WHERE key = ? AND number = ?",  # noqa: S608 - the names are this file's
            (*values.values(), key, number),
        )

    def _event(self, key: str | None, text: str) -> None:
        self._db.execute("INSERT INTO events VALUES (?, ?, ?)", (_now(), key, text))


def read_entries(root: Path) -> dict[str, JournalEntry]:
    """Return the journal's entries of all runs of a directory, by key; empty without a journal."""
    if not (path := root / ROOT_FILES.journal).exists():
        return {}
    with Journal.read_only(path) as journal:
        return journal.entries()


def _dump(status: JobStatus) -> str:
    return json.dumps(vars(status))  # it is flat: `asdict` would copy all of it


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class LoggedAttempt:
    """An attempt as the log has it.

    host: of the process that submitted it, root: the run's directory at that time; "" if the log does not tell.
    is_doubtful: it was given up without proof that nothing was submitted.
    """

    key: str
    number: int
    token: str
    host: str = ""
    root: str = ""
    is_withdrawn: bool = False
    is_doubtful: bool = False


class _Line(BaseModel):
    """One line: attempts (key, number) that are about to be submitted under a token, or keys that were withdrawn."""

    model_config = ConfigDict(strict=True)

    token: Annotated[str, Field(pattern=rf"\A{SIXTEEN_HEX}\z")]
    host: str = ""
    root: str = ""
    attempts: list[tuple[str, Annotated[int, Field(gt=0, lt=_MOST_ATTEMPTS)]]] = []
    withdrawn: list[str] = []
    is_doubtful: Any = False


class SubmissionLog:
    """The log of a run."""

    def __init__(self, root: Path) -> None:
        self._path = root / ROOT_FILES.submissions
        self._is_whole = False

    def submitting(self, token: str, attempts: Iterable[tuple[str, int]]) -> None:
        """Record an imminent submission. OSError: it cannot be written; nothing may be submitted then."""
        place = {"host": socket.gethostname(), "root": str(self._path.parent.resolve())}
        self._append({"token": token, **place, "attempts": list(attempts)})

    def withdrawn(self, token: str, keys: Iterable[str], *, is_doubtful: bool) -> None:
        """Record that attempts were given up, since apparently nothing was submitted."""
        self._append({"token": token, "withdrawn": list(keys), "is_doubtful": is_doubtful})

    def read(self) -> list[LoggedAttempt]:
        """Return the attempts in the order of submission; damaged lines are skipped.

        OSError: it cannot be read, or it is not a file.
        """
        attempts: dict[tuple[str, str], LoggedAttempt] = {}
        for line in filter(None, self._lines()):
            token = line.token
            for key, number in line.attempts:
                attempts[token, key] = LoggedAttempt(key, number, token, line.host, line.root)
            for key in line.withdrawn:
                if (known := attempts.get((token, key))) is not None:
                    attempts[token, key] = replace(known, is_withdrawn=True, is_doubtful=bool(line.is_doubtful))
        return list(attempts.values())

    def moved_from(self, attempt: LoggedAttempt) -> Path | None:
        """Return the run's directory at the time an attempt was submitted; None if it has not moved."""
        there = Path(attempt.root)
        with contextlib.suppress(OSError):
            if not attempt.root or there.samefile(self._path.parent):
                return None
        return there

    def original_of(self, tokens: Collection[str]) -> Path | None:
        """Return the directory that this one is a copy of, if it still exists. tokens: of unfinished attempts."""
        for attempt in self.read():
            there = self.moved_from(attempt) if attempt.token in tokens else None
            if there is not None and any(attempt.token == own.token for own in SubmissionLog(there).read()):
                return there
        return None

    def proves_loss(self, entries: Iterable[JournalEntry]) -> bool:
        """Return whether a journal has no attempt although some were submitted: it was emptied, or replaced."""
        return not any(entry.attempts for entry in entries) and any(not each.is_withdrawn for each in self.read())

    def damaged_line(self) -> int | None:
        """Return the number, from 1, of an unreadable line; a truncated last line was never submitted."""
        return next((number for number, line in enumerate(self._lines(), 1) if line is None), None)

    def _lines(self) -> Iterator[_Line | None]:
        """Yield the lines, None for a damaged line; a truncated last line is left out."""
        *lines, last = self._content().split(b"\n")
        yield from map(_parsed, lines)
        if (data := _parsed(last)) is not None:
            yield data

    def _content(self) -> bytes:
        try:
            return read_regular(self._path)
        except FileNotFoundError:
            return b""

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            if not self._is_whole:  # end the last line, or remove it if it is truncated
                content = self._content()
                last = content.rpartition(b"\n")[2]
                if _parsed(last) is not None:
                    file.write(b"\n")
                else:
                    file.truncate(len(content) - len(last))
                self._is_whole = True
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _parsed(line: bytes) -> _Line | None:
    try:
        return _Line.model_validate_json(line)
    except ValidationError:
        return None
