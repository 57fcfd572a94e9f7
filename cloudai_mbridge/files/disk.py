"""Full disks: name the file that could not be written, and the free space."""

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

_KIB = 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ALMOST_NOTHING = 128 * _KIB  # SQLite reports "disk I/O error" if its files next to the journal do not fit


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of a write; the operating system names it only on opening."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def free_space(path: Path) -> str:
    """Return the free space at a path, existing or not."""
    return f"{_free_bytes(path) // _KIB:,} KiB free"


def is_disk_full(error: BaseException | None, path: Path) -> bool:
    """Return whether an error of writing below a path means that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    if not isinstance(error, sqlite3.OperationalError):
        return False
    code = error.sqlite_errorcode & 0xFF
    no_room = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _free_bytes(path) < _ALMOST_NOTHING
    return no_room or code == sqlite3.SQLITE_FULL


def no_space_left(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _free_bytes(path: Path) -> int:
    existing = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    return shutil.disk_usage(existing).free
