"""Write a report's files, and those that a command is asked for: whole, or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from cloudai_mbridge.errors import BadInput


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a path to write to; what stands there takes `path`'s place, and its mode, once it is complete.

    Readers see the old file or the new one. Where writing fails, the old one stays.
    durable: the new one is on the disk at the end, whatever becomes of the machine.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")  # a name that no link can wait under
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
    """Write text as UTF-8, line ends as they are; what UTF-8 cannot say is written as an escape such as \\udcff."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def require_writable(path: Path) -> None:
    """Raise BadInput of a path at which no file can be written, before the work whose result it is to hold."""
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: is not a file; name a file to write")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: its directory does not exist; make {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise BadInput(f"{path}: its directory is read-only for this user; name a file in another one")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
