"""One driver per directory, and nobody beside a submission that is still under way.

Both are advisory locks on files in the root of a run, so they end with the process that holds them, however it ends.
The submission's lock is inherited by the command that submits: if the driver is killed while sbatch is talking to the
controller, whoever resumes waits until that sbatch has ended, and only then asks which jobs exist.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.launch.disk import naming
from cloudai_mbridge.plan import ROOT_FILES

_SUBMIT_WAIT_S = 300.0
_PAUSES_S = (0.05, 0.1, 0.2, 0.0)  # `has_driver` of another process holds the lock for a moment


@contextlib.contextmanager
def driver_lock(root: Path) -> Iterator[None]:
    """Be the only driver of a directory.

    Raises:
        BadInput: another one is at work.
    """
    with (root / ROOT_FILES.driver_lock).open("a+") as file:
        if not any(_try_lock(file.fileno(), pause_s) for pause_s in _PAUSES_S):
            file.seek(0)
            raise BadInput(f"{root}: is being driven by {file.read().strip() or 'another mbridge'}; wait for it")
        with naming(root / ROOT_FILES.driver_lock):
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def has_driver(root: Path) -> str | None:
    """Return who drives a directory, or None."""
    try:
        with (root / ROOT_FILES.driver_lock).open("r+") as file:
            if _try_lock(file.fileno()):
                return None
            return file.read().strip() or "another mbridge"
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def submit_lock(root: Path) -> Iterator[int]:
    """Wait for every submission of an earlier driver to end; yield the descriptor for the submitting command.

    Raises:
        ToolFailure: one does not end.
    """
    with (root / ROOT_FILES.submit_lock).open("a") as file:
        end = time.monotonic() + _SUBMIT_WAIT_S
        while not _try_lock(file.fileno()):
            if time.monotonic() > end:
                raise ToolFailure(f"{root}: a submission of an earlier driver has not ended in {_SUBMIT_WAIT_S:.0f} s")
            time.sleep(0.05)
        yield file.fileno()


def _try_lock(descriptor: int, pause_s: float = 0.0) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(pause_s)
        return False
    return True
