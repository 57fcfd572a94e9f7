"""The program of a rehearsal as a child: its events, line by line, and an end within a time limit, whatever comes."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from cloudai_mbridge.errors import MBridgeError, ToolFailure
from cloudai_mbridge.files.documents import parse_json
from cloudai_mbridge.files.text import clipped, visible
from cloudai_mbridge.start_up import defer_signals

Event = Mapping[str, Any]
_ERRORS = "errors.txt"
_GRACE_S = 10.0
_LAST_LINES = 40
_LONGEST = 400


class Terminated(MBridgeError):
    """SIGTERM ended a rehearsal. Nothing of it is left."""

    exit_code = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Ended:
    """End of the program. code: negative for a signal. is_late: it was killed at the time limit. said: last line."""

    code: int
    is_late: bool
    said: str


def run_program(
    directory: Path,
    script: str,
    env: Mapping[str, str],
    take: Callable[[Event], None],
    *,
    limit_s: float,
    waits: bool = False,
) -> Ended:
    """Run a script in its directory until it ends; `take` gets each event. Its whole process group is gone then.

    waits: it may wait for a node: the time limit begins with its first event.
    Terminated: SIGTERM has come.
    """
    errors = directory / _ERRORS
    with _terminating(), errors.open("wb") as stderr:
        act_on_signals = defer_signals()
        try:
            child = subprocess.Popen(
                ["bash", script],
                cwd=directory,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            act_on_signals()
            raise ToolFailure(f"bash cannot be started: {error}") from None
        limit = _Limit(child, limit_s)
        try:
            act_on_signals()
            if not waits:
                limit.start()
            for event in _events(child):
                limit.start()
                take(event)
            code = child.wait()
        finally:
            limit.stop()
            _end(child)
    return Ended(code, limit.is_over, _last_line(errors))


class _Limit:
    """The time that a child has once it is started here."""

    def __init__(self, child: "subprocess.Popen[bytes]", limit_s: float) -> None:
        self.is_over = False
        self._child, self._timer = child, threading.Timer(limit_s, self._fire)
        self._timer.daemon = True
        self._has_started = False

    def start(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def _fire(self) -> None:
        self.is_over = True
        _signal(self._child, signal.SIGTERM)
        time.sleep(_GRACE_S)
        _signal(self._child, signal.SIGKILL)


def _events(child: "subprocess.Popen[bytes]") -> Iterator[Event]:
    """Yield the objects among a child's lines; a launcher on its way, such as srun, may print others."""
    assert child.stdout is not None
    for line in child.stdout:
        with contextlib.suppress(ValueError, RecursionError):
            event = parse_json(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                yield event


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a child and its group: srun gives its node back at SIGTERM, not at SIGKILL."""
    if child.poll() is None:
        _signal(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    _signal(child, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _signal(child: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def _terminating() -> Iterator[None]:
    """Raise Terminated at SIGTERM, in the main thread, so that the child is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated("interrupted by SIGTERM; nothing of the rehearsal is left")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _last_line(path: Path) -> str:
    """Return the last line with text of a file."""
    lines = path.read_bytes().decode(errors="replace").splitlines()[-_LAST_LINES:]
    return clipped(visible(next((line.strip() for line in reversed(lines) if line.strip()), "")), _LONGEST)
