"""Read files that anybody may have put there: regular files only, so that no read waits or goes on for ever."""

import os
import stat
from io import BufferedReader
from pathlib import Path

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
