"""Keep two installs of one directory apart, on one machine or on two that share it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudai_mbridge.install.place import Notify

_NAME = ".mbridge-install.lock"


@contextmanager
def locked(directory: Path, notify: Notify) -> Iterator[None]:
    """Hold the directory's lock; it ends with the process. Wait for another holder.

    Some shared file systems have no locks. There the install goes on, and says so.
    """
    descriptor = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, directory, notify)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path, notify: Notify) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify(f"waiting for another install to finish in {directory}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        notify(f"{directory} cannot be locked ({error.strerror}); run one install at a time")
