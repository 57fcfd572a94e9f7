"""Full disks: name the file that could not be written, and how much space there is."""

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

_KIB = 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ALMOST_NOTHING = 128 * _KIB  # SQLite says "disk I/O error" where its files beside the journal find no room


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError of a write name the file; the operating system names it only where it is opened."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def free_space(path: Path) -> str:
    """Return how much space is free where a path is, or would be."""
    return f"{_free_bytes(path) // _KIB:,} KiB free"


def is_disk_full(error: BaseException | None, path: Path) -> bool:
    """Return whether an error of writing below a path means that there is no space left."""
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
