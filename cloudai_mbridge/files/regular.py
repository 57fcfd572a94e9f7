"""Read untrusted files: regular files only, so that no read blocks or continues forever."""

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

_CHUNK = 1 << 20
_MOST_READ = 2 << 30
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


class NotRegular(OSError):
    """The path leads to no regular file, or to one too large to be read as a whole; strerror says to what."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    OSError: the file cannot be opened, or is not a regular file.
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
    """Yield the contents of a file from its current position. Holes, of any size and without content, are skipped."""
    while chunk := file.read(_CHUNK):
        yield chunk
        if is_empty(chunk):
            pass_hole(file)


def is_empty(chunk: bytes) -> bool:
    """Return whether a chunk contains only NULs, and may be part of a hole."""
    return not chunk.strip(b"\0")


def pass_hole(file: BufferedReader) -> None:
    """Seek to the next data of a file, to its end if none follows."""
    start, end = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(next((each for each, _ in _data_ranges(file, start, end)), end))


def data_ranges(file: BufferedReader) -> list[tuple[int, int]]:
    """Return the data ranges of a file as (start, end), in order; between them are holes."""
    return list(_data_ranges(file, 0, file.seek(0, os.SEEK_END)))


def _data_ranges(file: BufferedReader, start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        try:
            first = os.lseek(file.fileno(), start, os.SEEK_DATA)
            start = os.lseek(file.fileno(), first, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system does not report holes
                yield start, end
            return
        yield first, start


def copy_regular(source: Path, target: Path) -> None:
    """Copy a regular file, preserving holes; OSError: as above, or the copy cannot be written."""
    with open_regular(source) as old, target.open("wb") as new:
        for start, end in data_ranges(old):
            old.seek(start)
            new.seek(start)
            for at in range(start, end, _CHUNK):
                new.write(old.read(min(_CHUNK, end - at)))
        new.truncate(os.fstat(old.fileno()).st_size)


def read_regular(path: Path, most: int = _MOST_READ) -> bytes:
    """Return the contents of a regular file of at most `most` bytes; OSError: as above, or it is larger."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise NotRegular(None, f"a file of {size:,} bytes, and at most {most:,} are read", str(path))
        return file.read()


def _refuse_others(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotRegular(None, f"{kind}, not a regular file", str(path))
