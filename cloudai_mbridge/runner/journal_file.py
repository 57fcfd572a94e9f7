"""The file of a journal: its format, and its rows as values. Readers leave no trace.

A damaged row affects its own run only, and never makes it a success. An ended attempt whose status cannot be read ended
in a state that proves nothing. For an attempt that has not ended, the scheduler is queried again, and an unreadable
verdict is derived again from the run's files.
"""

import contextlib
import json
import math
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from cloudai_mbridge.errors import Damaged, OtherVersion, ToolFailure, shown
from cloudai_mbridge.files.regular import copy_regular
from cloudai_mbridge.files.replace import free_space
from cloudai_mbridge.files.run_files import ROOT_FILES
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus

# Increase it with every change of the tables, or of a JSON column's content. Files without a version (0) are as of 1.
JOURNAL_VERSION = 1
_APPLICATION_ID = 0x6D62726A  # "mbrj"
_SCHEMA = f"""
BEGIN IMMEDIATE;
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
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {JOURNAL_VERSION};
COMMIT;
"""
_TABLES = {"runs", "attempts", "nodes", "events", "facts"}
_RESTORE = (
    "restore it from a backup, or move it and its -wal and -shm files away: mbridge resume rebuilds it from"
    f" {ROOT_FILES.submissions} (jobs that still run: squeue --me)"
)
_OF_THE_MACHINE = {
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
}
_COPIES = 5
_LONGEST_VALUE = 4 << 20  # of a column or a row
# A run that a search did not need. It is not a verdict of the report, which leaves such runs out
UNTRIED = "untried"
VERDICTS = frozenset({"success", "failed", "skipped", "cancelled", UNTRIED})
_STATUS = TypeAdapter(JobStatus)
_REASONS = TypeAdapter(list[str])
_FIELDS = {each.name for each in fields(JobStatus)}
_JOB_ID = re.compile(r"[^-\s\0][^\s\0]{0,200}")  # not an option of scancel
_UNKNOWN_END = JobStatus("DAMAGED", JobClass.LOST, reason="the journal does not say how the job ended")
_T = TypeVar("_T")


def open_journal(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Open a journal for the process that writes it; create its tables in a new file.

    OtherVersion, Damaged: it is not a journal that this mbridge writes; nothing was changed.
    ToolFailure: the file cannot be created or written.
    """
    with reading(path):
        db = sqlite3.connect(path, isolation_level=None, timeout=timeout_s)
    try:
        with reading(path):
            _check(db, path)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            if _version(db) != JOURNAL_VERSION:
                db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


@contextlib.contextmanager
def open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a journal for reading, without writing next to it; works in a read-only directory, too.

    Without a write-ahead log the file itself is whole. With one, SQLite would write to its index: a copy is read.
    OtherVersion, Damaged: it is not a journal that this mbridge reads. ToolFailure: the file cannot be read.
    """
    with contextlib.ExitStack() as stack:
        with reading(path):
            log = _log_of(path)
            if not path.is_file():
                raise Damaged(f"{path}: is not a file; {_RESTORE}")
            if not log.is_file() or not log.stat().st_size:
                uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            else:
                copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mbridge-"))) / path.name
                # A file that is being written all the time has an index that is, too
                uri = copy.as_uri() if _copied(path, copy) else f"{path.absolute().as_uri()}?mode=ro"
            db = stack.enter_context(contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)))
            _check(db, path)
        yield db


def _copied(path: Path, copy: Path) -> bool:
    """Copy a journal with its log; return whether neither changed meanwhile, after a few tries."""
    log = _log_of(path)
    for _ in range(_COPIES):
        before = (_stamp(path), _stamp(log))
        copy_regular(path, copy)
        with contextlib.suppress(FileNotFoundError):  # its last writer has put it into the file, and left
            copy_regular(log, _log_of(copy))
        if before == (_stamp(path), _stamp(log)):
            return True
    return False


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Raise unless this is a journal of this version, or a file without any table.

    Afterwards text that is not UTF-8 is read as it is, not as an error of the whole file; huge values are refused.
    """
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    db.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
    version = _version(db)
    application = db.execute("PRAGMA application_id").fetchone()[0]
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if application not in (0, _APPLICATION_ID) or (tables and not tables & _TABLES):
        raise Damaged(f"{path}: is another program's database, not the journal of a run; {_RESTORE}")
    if version not in (0, JOURNAL_VERSION):
        raise OtherVersion(
            f"{path}: has version {version}, and this mbridge knows version {JOURNAL_VERSION};"
            " use the mbridge that wrote it"
        )
    if tables and (missing := sorted(_TABLES - tables)):
        raise Damaged(f"{path}: is damaged (the table {missing[0]!r} is missing); {_RESTORE}")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Translate an error of SQLite into an error that names the file.

    ToolFailure: the file cannot be opened, read or written now. Damaged: its content is not a journal.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _OF_THE_MACHINE:
            space = f"; {free_space(path)}" if code == sqlite3.SQLITE_FULL else ""
            raise ToolFailure(f"{path}: cannot be read or written ({error}{space})") from None
        raise Damaged(f"{path}: is damaged, or not the journal of a run ({shown(str(error))}); {_RESTORE}") from None
    except ValueError as error:  # such as a name of a column that is not UTF-8
        raise Damaged(f"{path}: is damaged ({shown(str(error))}); {_RESTORE}") from None
    except OSError as error:
        raise ToolFailure(f"{path}: cannot be read ({error.strerror or error})") from None


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
    ended_at: str | None  # "" if it has ended, and the time cannot be read
    failure: str


@dataclass(frozen=True)
class JournalEntry:
    """Rows of one run. verdict is None until the run has ended for good. note: why it was not tried again.

    damage: unreadable rows.
    """

    key: str
    verdict: str | None
    reasons: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    note: str = ""
    damage: tuple[str, ...] = ()

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


def read_entry(row: Iterable[Any], attempts: Iterable[Iterable[Any]]) -> JournalEntry:
    """Return a run from its row and the rows of its attempts.

    Of an attempt: number, token, job_id, status, ending, submitted_at, started_at, ended_at, failure.
    """
    damage: list[str] = []

    def read(where: str, text: Any, convert: Callable[[str], _T]) -> _T | None:
        if text is None:
            return None
        try:
            if not isinstance(text, str):
                raise ValueError("not a text")
            return convert(text)
        except (ValueError, RecursionError, ValidationError) as error:
            said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            damage.append(f"{where}: {shown(text)}: {shown(said)}")
            return None

    def read_attempt(row: Iterable[Any]) -> Attempt:
        number, token, job_id, status, ending, submitted_at, started_at, ended_at, failure = row
        where = f"attempt {number}"
        if not isinstance(number, int) or not (isinstance(token, str) and token) or not isinstance(failure, str):
            damage.append(f"{where}: the row is not of an attempt")
            known = number if isinstance(number, int) else 0
            return Attempt(known, "", None, _UNKNOWN_END, None, None, None, ended_at="", failure="")
        read_status = read(f"{where}: status", status, _to_status)
        if read_status is None and ended_at is not None:
            read_status = _UNKNOWN_END
        return Attempt(
            number=number,
            token=token,
            job_id=read(f"{where}: job_id", job_id, _to_job_id),
            status=read_status,
            ending=read(f"{where}: ending", ending, _to_status),
            submitted_at=read(f"{where}: submitted_at", submitted_at, _to_time),
            started_at=read(f"{where}: started_at", started_at, _to_time),
            ended_at=None if ended_at is None else read(f"{where}: ended_at", ended_at, _to_time) or "",
            failure=failure,
        )

    key, verdict, reasons, note = row
    tried = tuple(map(read_attempt, attempts))
    decided = read("verdict", verdict, _to_verdict)
    why = read("reasons", reasons, lambda text: _REASONS.validate_json(text, strict=True))
    return JournalEntry(key, decided, tuple(why or ()), tried, str(note), tuple(damage))


def _to_status(text: str) -> JobStatus:
    data = json.loads(text)
    if not isinstance(data, dict) or (unknown := sorted(set(data) - _FIELDS)):
        raise ValueError(f"unknown field {unknown[0]}" if isinstance(data, dict) else "not a table")
    status = _STATUS.validate_json(text, strict=True)
    if status.run_time_s is not None and not (math.isfinite(status.run_time_s) and status.run_time_s >= 0):
        raise ValueError("run_time_s is not a duration")
    return status


def _to_verdict(text: str) -> str:
    if text not in VERDICTS:
        raise ValueError("unknown verdict")
    return text


def _to_time(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except OverflowError as error:
        raise ValueError(str(error)) from None
    return text


def _to_job_id(text: str) -> str:
    if not _JOB_ID.fullmatch(text):
        raise ValueError("not a job id")
    return text
