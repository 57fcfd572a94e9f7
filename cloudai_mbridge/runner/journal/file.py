"""Opening a journal's file: only in a format that this mbridge reads; readers leave no trace."""

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cloudai_mbridge.errors import Damaged, OtherVersion, ToolFailure, shown
from cloudai_mbridge.files.regular import copy_regular
from cloudai_mbridge.files.replace import free_space
from cloudai_mbridge.files.run_files import ROOT_FILES

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

    OtherVersion, Damaged: it is not a journal that this mbridge reads. ToolFailure: the file cannot be read.
    """
    with contextlib.ExitStack() as stack:
        with reading(path):
            uri = _undisturbed(path, stack)
            db = stack.enter_context(contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)))
            _check(db, path)
        yield db


def _undisturbed(path: Path, stack: contextlib.ExitStack) -> str:
    """Return the URI under which SQLite reads a journal without writing next to it.

    Without a write-ahead log the file itself is whole. With one, SQLite would write to its index: a copy is read.
    """
    log = _log_of(path)
    if not path.is_file():
        raise Damaged(f"{path}: is not a file; {_RESTORE}")
    if not log.is_file() or not log.stat().st_size:
        return f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mbridge-"))) / path.name
    for _ in range(_COPIES):
        before = (_stamp(path), _stamp(log))
        copy_regular(path, copy)
        with contextlib.suppress(FileNotFoundError):  # its last writer has put it into the file, and left
            copy_regular(log, _log_of(copy))
        if before == (_stamp(path), _stamp(log)):
            return copy.as_uri()
    return f"{path.absolute().as_uri()}?mode=ro"  # it is being written all the time, so its index is, too


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
