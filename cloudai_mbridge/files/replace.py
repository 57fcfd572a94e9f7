"""Write reports and requested output files whole, or not at all; name the file if the disk is full."""

import contextlib
import errno
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from cloudai_mbridge.errors import BadInput

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


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write to; once complete, the file there replaces `path` and takes its mode.

    Readers see the old file or the new file. If writing fails, the old file stays.
    durable: the new file is on the disk at the end, even if the machine fails.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")  # random, so no link can be placed there
    try:
        yield unfinished
        with contextlib.suppress(FileNotFoundError):
            unfinished.chmod(path.stat().st_mode & 0o777)
        if durable:
            _sync(unfinished)
        unfinished.replace(path)
        if durable:
            _sync(path.parent)
    except OSError as error:
        if error.errno is None:  # a library's own message
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the name of the unfinished file
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, line ends unchanged; lone surrogates are written as an escape such as \\udcff."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def require_writable(path: Path) -> None:
    """Raise BadInput if no file can be written at a path, before the work that produces the file."""
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: is not a file; name a file to write")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: its directory does not exist; make {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"{path}: its directory is read-only for this user; name a file in another one")


PAGE_TITLE = "<title>Benchmark report</title>"  # of every page that is written here
_HEAD = 4096


def require_page(path: Path) -> None:
    """Raise BadInput if no page can be written at a path, or another file would be lost by it."""
    require_writable(path)
    if path.exists() and (text := path.read_bytes()[:_HEAD]) and PAGE_TITLE.encode() not in text:
        raise BadInput(f"{path}: exists and is no page of mbridge, which would replace it; name another file")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
