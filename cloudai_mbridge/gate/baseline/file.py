"""Replace a baseline file as a whole, and only if it still is what the replacement was made from."""

import contextlib
import fcntl
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.files.replace import replacing


def read_bytes(path: Path) -> bytes | None:
    """Return what a file holds, None without one."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); give the path of a baseline file") from None


def replace_if_unchanged(path: Path, old: bytes | None, new: bytes) -> bool:
    """Write `new` if the file holds `old` (None: is not there), and return whether it did.

    Whoever is killed while at it leaves the old file, whole; two at a time take turns.

    Raises:
        ToolFailure: the file cannot be written.
    """
    target = path.resolve()  # of a link, what it points to is replaced
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if read_bytes(target) != old:
                return False
            for left in target.parent.glob(f".{glob.escape(target.name)}.*.new"):  # by a process that was killed
                left.unlink(missing_ok=True)
            with replacing(target, durable=True) as unfinished:
                unfinished.write_bytes(new)
    except OSError as error:
        raise ToolFailure(f"{path}: cannot be written ({error.strerror or error}); the old file is unchanged") from None
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which is removed at the end, so that it never lies beside the files under version control."""
    descriptor = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits for it sees that it is gone, and starts anew
        os.close(descriptor)


def _lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the file that is open is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
