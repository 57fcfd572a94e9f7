"""Read files that anybody may have put there: regular files only, so that no read waits or goes on for ever."""

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

_CHUNK = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


class NotRegular(OSError):
    """The path leads to something that is not a regular file; strerror says to what."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: the file cannot be opened, or it is not a regular one.
    """
    _refuse_others(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_others(os.fstat(descriptor).st_mode, path)  # it may have been replaced in between
    except NotRegular:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_chunks(file: BufferedReader) -> Iterator[bytes]:
    """Yield what a file holds, from where it stands. Holes, of any size and without content, are passed over."""
    while chunk := file.read(_CHUNK):
        yield chunk
        if not chunk.strip(b"\0"):
            try:
                file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
            except OSError:  # nothing but a hole is left
                file.seek(0, os.SEEK_END)


def read_regular(path: Path) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: as above.
    """
    with open_regular(path) as file:
        return file.read()


def _refuse_others(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotRegular(None, f"{kind}, not a regular file", str(path))
