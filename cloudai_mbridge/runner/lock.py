"""One process holds a run, its driver; a resumed run waits for a submission that is still under way.

Both are advisory locks on files in the root of a run, so they end with the process that holds them, however it ends.
The submission's lock is inherited by the command that submits: if the driver is killed while sbatch is talking to the
controller, the next driver waits until that sbatch has ended, and only then lists the jobs.

A request to cancel is a file, too: the process that holds the run may be on another machine.
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

import psutil

from cloudai_mbridge.errors import InUse, ToolFailure
from cloudai_mbridge.files.replace import naming
from cloudai_mbridge.logs.tail import printable
from cloudai_mbridge.plan import ROOT_FILES

_SUBMIT_WAIT_S = 300.0
_TOLD_AFTER_S = 3.0
_CHILD_WAIT_S = 30.0
_PAUSES_S = (0.05, 0.1, 0.2, 0.0)  # `has_driver` of another process holds the lock for a moment


@contextlib.contextmanager
def driver_lock(root: Path) -> Iterator[None]:
    """Hold a directory, as its only driver; raise InUse if another process holds it."""
    with _open(root / ROOT_FILES.driver_lock, "a+") as file:
        if not any(_try_lock(file.fileno(), pause_s=pause_s) for pause_s in _PAUSES_S):
            _wait_for_child(root, file)
        with naming(root / ROOT_FILES.driver_lock):
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


def _wait_for_child(root: Path, file: TextIO, kind: int = fcntl.LOCK_EX) -> None:
    """Take the lock of a driver that was killed while it started a command: until that runs, it has the lock, too.

    InUse: the driver is alive, or on another machine.
    """
    end = time.monotonic() + _CHILD_WAIT_S
    while not _try_lock(file.fileno(), kind, pause_s=0.05):
        owner = re.fullmatch(r"process (\d+) on (.+)", _owner(file))
        has_ended = False
        if owner and owner[2] == socket.gethostname():
            try:
                has_ended = psutil.Process(int(owner[1])).status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                has_ended = True
        if time.monotonic() > end or not has_ended:
            raise InUse(f"{root}: is held by {_owner(file)}; wait for its end: mbridge watch {root}")


@contextlib.contextmanager
def no_driver(root: Path) -> Iterator[None]:
    """Keep a directory from being held for a moment; write nothing. InUse: a process holds it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file = stack.enter_context(_open(root / ROOT_FILES.driver_lock, "r"))
            _wait_for_child(root, file, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def reading(root: Path) -> Iterator[str | None]:
    """Keep a directory from being held while it is read; yield which process holds it already, None if none does."""
    with contextlib.ExitStack() as stack:
        held_by = None
        while held_by is None:
            try:
                stack.enter_context(no_driver(root))
                break
            except InUse:
                held_by = has_driver(root)
        yield held_by


def has_driver(root: Path) -> str | None:
    """Return which process holds a directory, None if none does."""
    try:
        with _open(root / ROOT_FILES.driver_lock, "r") as file:
            return None if _try_lock(file.fileno(), fcntl.LOCK_SH) else _owner(file)
    except (FileNotFoundError, NotADirectoryError):
        return None


def beat(root: Path) -> None:
    """Note on the lock's file that the scheduler has just answered its holder, if that is possible."""
    with contextlib.suppress(OSError):
        os.utime(root / ROOT_FILES.driver_lock, follow_symlinks=False)


def changed_at(path: Path) -> datetime | None:
    """Return when a file, with SQLite's log of it, was last written; None if it is missing."""
    times = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        with contextlib.suppress(OSError):
            times.append(each.stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _owner(file: TextIO) -> str:
    file.seek(0)
    return printable(file.read(200).strip()) or "another mbridge"


def _open(path: Path, mode: str) -> TextIO:
    """Open a lock's file itself, without waiting if it is a named pipe; raise ToolFailure if it is a link."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        return cast(TextIO, open(path, mode, encoding="utf-8", errors="replace", opener=opener))
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise ToolFailure(f"{path}: is a link, which is not followed; remove it") from None
        raise


@contextlib.contextmanager
def submit_lock(root: Path, notice: Callable[[str], None] = lambda _: None) -> Iterator[int]:
    """Wait for every submission of an earlier driver to end; yield the descriptor for the submitting command.

    notice: takes a line about the pending submission. ToolFailure: it does not end.
    """
    path = root / ROOT_FILES.submit_lock
    with _open(path, "a") as file:
        start, has_told = time.monotonic(), False
        while not _try_lock(file.fileno()):
            waited_s = time.monotonic() - start
            if waited_s > _SUBMIT_WAIT_S:
                text = f"a submission of an earlier driver has not ended in {_SUBMIT_WAIT_S:.0f} s ({_holders(path)})"
                raise ToolFailure(f"{root}: {text}; end that process, then resume")
            if waited_s > _TOLD_AFTER_S and not has_told:
                has_told = True
                notice(f"waiting for a submission of an earlier driver to end ({_holders(path)})")
            time.sleep(0.05)
        yield file.fileno()


def _holders(path: Path) -> str:
    """Return the other processes that have a lock's file open, as far as this user may see them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(Path(file.path) == path.resolve() for file in process.open_files()):
                found.append(f"process {process.pid}, {printable(process.name())}")
    return "; ".join(found) or "a process on another machine, or of another user"


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX, pause_s: float = 0.0) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(pause_s)
        return False
    return True


def request_cancel(root: Path) -> None:
    """Ask the driver to cancel; a second request changes nothing. OSError: the file cannot be made."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    os.close(os.open(root / ROOT_FILES.cancel_request, flags, 0o666))


def is_cancel_requested(root: Path) -> bool:
    """Return whether there is a request to cancel."""
    return os.path.lexists(root / ROOT_FILES.cancel_request)


def clear_cancel(root: Path) -> None:
    """Remove the request."""
    (root / ROOT_FILES.cancel_request).unlink(missing_ok=True)
