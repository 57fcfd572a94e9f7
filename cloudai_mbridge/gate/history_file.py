"""The history file: its tables and stored records, and opening it safely."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cloudai_mbridge.errors import BadInput, Damaged, ToolFailure, shown
from cloudai_mbridge.files.documents import parse_json
from cloudai_mbridge.files.regular import open_regular
from cloudai_mbridge.gate.runs import Values, is_value_of

SCHEMA_VERSION = 2
FAILED = "failed"
# How long another process may lock the file; an import locks it for milliseconds per report.
BUSY_TIMEOUT_S = 30.0
_APPLICATION_ID = 0x6D627269  # "mbri"
_REMEDY = "restore it from a backup, or import the reports again, into a file that does not exist yet"
_OF_THE_MACHINE = {
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_TOOBIG),
}
_MOST_SAID, _MOST_SHOWN = 200, 40  # SQLite quotes a whole table
_MAGIC = b"SQLite format 3\0"

_TABLES = (
    """CREATE TABLE reports (
        id INTEGER PRIMARY KEY,
        sha256 TEXT NOT NULL UNIQUE,
        path TEXT NOT NULL,
        imported_at TEXT NOT NULL,
        ended_at TEXT,
        scenario TEXT,
        system TEXT,
        schema_version INTEGER NOT NULL
    ) STRICT""",
    "CREATE TABLE keys (id TEXT PRIMARY KEY, fields TEXT NOT NULL) STRICT",
    "CREATE TABLE environments (id INTEGER PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, fields TEXT NOT NULL) STRICT",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY,
        run_id TEXT NOT NULL,
        report INTEGER NOT NULL REFERENCES reports,
        point TEXT NOT NULL,
        scenario TEXT NOT NULL,
        system TEXT NOT NULL,
        key TEXT NOT NULL REFERENCES keys,
        verdict TEXT NOT NULL,
        reasons TEXT NOT NULL,
        ended_at TEXT NOT NULL,
        nodes TEXT NOT NULL,
        git_commit TEXT,
        environment INTEGER NOT NULL REFERENCES environments,
        warmup_steps INTEGER NOT NULL,
        num_steps INTEGER,
        flops_formula TEXT,
        flops_per_step REAL,
        UNIQUE (run_id, verdict)
    ) STRICT""",
    # All runs of a report, including runs imported from an earlier report or not imported
    """CREATE TABLE held (
        report INTEGER NOT NULL REFERENCES reports,
        run_id TEXT NOT NULL,
        point TEXT NOT NULL,
        PRIMARY KEY (report, run_id)
    ) STRICT, WITHOUT ROWID""",
    # Successes that failed when judged again; without them every run is unique
    "CREATE TABLE withdrawn (run INTEGER PRIMARY KEY REFERENCES runs) STRICT",
    "CREATE VIEW judged AS SELECT * FROM runs WHERE id NOT IN (SELECT run FROM withdrawn)",
    """CREATE TABLE metrics (
        run INTEGER NOT NULL REFERENCES runs,
        name TEXT NOT NULL,
        value ANY NOT NULL,
        PRIMARY KEY (run, name)
    ) STRICT, WITHOUT ROWID""",
    "CREATE INDEX reports_of_a_scenario ON reports (scenario, system, ended_at)",
    "CREATE INDEX runs_of_a_key ON runs (key, verdict, ended_at)",
    "CREATE INDEX runs_of_a_point ON runs (point, key, verdict, ended_at)",
)
# Tables and views by name, as stored by SQLite
_DEFINITIONS = {
    statement.split()[2]: " ".join(statement.split())
    for statement in _TABLES
    if statement.startswith(("CREATE TABLE", "CREATE VIEW"))
}
_TRIGGERS = tuple(
    f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table}"
    " BEGIN SELECT RAISE(ABORT, 'the history is append-only'); END"
    for table in _DEFINITIONS
    if table != "judged"  # a view
    for verb in ("UPDATE", "DELETE")
)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open an existing history; writers may continue to write.

    BadInput: the file is missing, not a history, of another version, or damaged.
    ToolFailure: it cannot be read.
    """
    if not path.is_file():
        raise BadInput(f"{path}: is not a file; make it with `mbridge history import RUN`, or name another")
    _check_magic(path)
    with _opened(path, "mode=ro") as db:
        with transaction(db, "DEFERRED"):
            filled = _is_history(db, path)
        if not filled:
            raise BadInput(f"{path}: is empty; fill it with `mbridge history import RUN`")
        return db


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or create a history.

    BadInput: the file is not a history, of another version, or damaged; it is left unchanged.
    ToolFailure: it cannot be written.
    """
    if path.exists():
        _check_magic(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolFailure(f"{path.parent}: cannot be made ({error.strerror})") from None
    with _opened(path, "mode=rwc") as db:
        with transaction(db, "DEFERRED"):
            _is_history(db, path)
        # A write-ahead log: readers and a writer do not wait for each other. SQLite does not wait here
        end = time.monotonic() + BUSY_TIMEOUT_S
        while db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        with transaction(db):
            if not _is_history(db, path):
                for statement in (*_TABLES, *_TRIGGERS):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return db


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Yield a connection that stays open unless something fails."""
    with failures(path), contextlib.ExitStack() as on_failure:
        db = on_failure.enter_context(contextlib.closing(_connect(path, mode)))
        yield db
        on_failure.pop_all()


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commit all writes inside at once, or none; other writers wait. DEFERRED: reads inside see one state."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def failures(path: Path) -> Iterator[None]:
    """Turn SQLite's errors for a history into one-line errors.

    ToolFailure: the file cannot be read or written now.
    Damaged: its content is not a history.
    """
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_MACHINE:
            raise ToolFailure(f"{path}: the history cannot be read or written: {error}") from None
        raise Damaged(f"{path}: is damaged ({_words(str(error))[:_MOST_SAID]}); {_REMEDY}") from None


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn errors for invalid stored values into one-line errors.

    Damaged: a stored value is invalid.
    """
    try:
        yield
    except (LookupError, ValueError) as error:
        raise Damaged(f"{path}: is damaged ({error}); {_REMEDY}") from None


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{mode}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    if mode != "mode=ro":
        return db
    try:
        db.execute("PRAGMA user_version")
    except sqlite3.OperationalError:
        db.close()
        if path.with_name(f"{path.name}-wal").exists():
            raise
        # A directory without write permission: no write-ahead log exists next to the file
        return sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
    return db


def _check_magic(path: Path) -> None:
    try:
        with open_regular(path) as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); name a history: --history FILE") from None
    if head and head != _MAGIC:
        raise BadInput(f"{path}: is not an SQLite file; name a history, or a new file: --history FILE")


def _is_history(db: sqlite3.Connection, path: Path) -> bool:
    """Return False for a file without tables; raise BadInput for another program's or version's, or a damaged file.

    Call it in a transaction: a first writer may commit between the reads.
    """
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application != _APPLICATION_ID:
        if version or db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise BadInput(f"{path}: is another program's SQLite file; name a history: --history FILE")
        return False
    if version > SCHEMA_VERSION:
        raise BadInput(
            f"{path}: has version {version}, and this mbridge knows up to {SCHEMA_VERSION}; use a newer mbridge"
        )
    if version < SCHEMA_VERSION:
        raise BadInput(
            f"{path}: has version {version} of before the first release, {SCHEMA_VERSION} is needed; import the reports"
            " again, into a file that does not exist yet"
        )
    # Tables, views and triggers must be those of `_TABLES` and `_TRIGGERS`: SQL is not data
    rows = db.execute("SELECT type, name, sql FROM sqlite_schema").fetchall()
    found = {name: _words(sql) for kind, name, sql in rows if kind in ("table", "view")}
    alien = [("table", name) for name, statement in _DEFINITIONS.items() if found.get(name) != statement]
    alien += [(kind, name) for kind, name, sql in rows if kind == "trigger" and _words(sql) not in _TRIGGERS]
    for kind, name in alien:
        raise Damaged(f"{path}: is damaged (the {kind} {name!r} is not one that mbridge made); {_REMEDY}")
    return True


def _words(statement: str | None) -> str:
    return " ".join((statement or "").split())


@dataclass(frozen=True)
class StoredPoint:
    """The runs of one point under one comparability key. last_value: the last good run's step time, if it has one."""

    point: str
    comparability_id: str
    num_good: int
    num_failed: int
    last_ended_at: str
    last_value: Any


@dataclass(frozen=True)
class StoredRun:
    """A run of the history. values: by metric. ended_at: UTC. commit: of its checkout, None if unknown."""

    run_id: str
    point: str
    scenario: str
    system: str
    comparability_id: str
    verdict: Literal["success", "failed"]
    reasons: tuple[str, ...]
    ended_at: str
    nodes: tuple[str, ...]
    commit: str | None
    warmup_steps: int
    num_steps: int | None
    flops_formula: str | None
    flops_per_step: float | None
    environment: Mapping[str, Any]
    values: Mapping[str, Values]


def read_texts(stored: str) -> tuple[str, ...]:
    """Parse a list of texts; ValueError: not a list of texts."""
    found = _parse(stored)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"{shown(stored, _MOST_SHOWN)} is not a list of texts")
    return tuple(found)


def read_table(stored: str) -> Mapping[str, Any]:
    """Parse a table; ValueError: not a table."""
    found = _parse(stored)
    if not isinstance(found, dict):
        raise ValueError(f"{shown(stored, _MOST_SHOWN)} is not a table")
    return found


def read_values(name: str, stored: Any) -> Values:
    """Parse the numbers of a metric; ValueError: invalid for the metric."""
    found = _parse(stored) if isinstance(stored, str) else [stored]
    values = tuple(found) if isinstance(found, list) else ()
    if not all(isinstance(value, float) for value in values) or not is_value_of(name, values):
        raise ValueError(f"{shown(stored, _MOST_SHOWN)} is not a {name}")
    return values


def _parse(stored: str) -> Any:
    """Parse JSON; None if invalid."""
    with contextlib.suppress(ValueError, RecursionError):
        return parse_json(stored.encode())
    return None
