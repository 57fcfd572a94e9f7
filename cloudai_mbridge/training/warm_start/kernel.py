"""What the kernel shows of a process in /proc: when it started, its command line and its environment."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_PID_FIELD = 1
_START_TIME, _ARGUMENTS, _ENVIRONMENT = 22, 48, 50  # fields of proc_pid_stat(5); the latter two also have an end


def process_id(pid: int) -> str:
    """Return PID.START, which no other process has, also after process ids have wrapped around; OSError: it is gone."""
    return f"{pid}.{_field(pid, _START_TIME)}"


def show(command: Sequence[str], name: str, value: str) -> None:
    """Change what /proc shows of this process: its command line, as far as there is room, and one variable.

    A process has the command line and environment that it was executed with, also after a fork and a change of
    `os.environ`. The variable must be there, with a value of the same length. OSError: it could not be changed.
    """
    start, end = (_field(os.getpid(), _ARGUMENTS + i) for i in range(2))
    room = end - start
    ctypes.memmove(start, b"\0".join(map(os.fsencode, command))[: room - 1].ljust(room, b"\0"), room)
    set_variable(name, value)


def set_variable(name: str, value: str) -> None:
    """Change a variable in what /proc shows of this process; as `show`."""
    own, new = Path("/proc/self/environ"), f"{name}={value}".encode()
    before = b"\0" + own.read_bytes()
    place = before.find(b"\0" + new.partition(b"=")[0] + b"=")
    if place < 0 or before.find(b"\0", place + 1) - place - 1 != len(new):
        raise OSError(f"{name}: has no place for a value of {len(value)} bytes")
    ctypes.memmove(_field(os.getpid(), _ENVIRONMENT) + place, new, len(new))
    if new not in own.read_bytes().split(b"\0"):
        raise OSError(f"{name}: cannot be changed in /proc")


def _field(pid: int, number: int) -> int:
    after_the_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    return int(after_the_name.split()[number - 3])
