"""The pace of the loop, and the signals that end it.

Signals are handled at safe points only: never between a submission and its entry in the journal.
"""

import random
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from cloudai_mbridge.errors import MBridgeError

_SLICE_S = 0.1
_ASK_S = 1.0
_COST = 5.0  # back off from a busy controller: wait at least so many times as long as its answer took
_JITTER = 0.1


class Interrupted(MBridgeError):
    """A signal ended the sweep. What was running has been cancelled, except for what the text names."""

    def __init__(self, number: int, left_running: str = "") -> None:
        """left_running: the jobs whose end mbridge did not wait for."""
        left = f"mbridge did not wait; may still run: {left_running}" if left_running else "running jobs were cancelled"
        super().__init__(f"interrupted by {signal.Signals(number).name}; {left}")
        self.number, self.left_running = number, left_running
        self.exit_code = 128 + number


class SecondSignal(Exception):
    """A second signal came while the jobs of the first were being cancelled."""


class Interrupts:
    """While active, remember the first SIGINT or SIGTERM. A second one is an exception once cancelling has begun.

    Only the main thread receives signals: in another thread nothing is remembered.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._may_raise = False

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._remember) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if self._may_raise and len(self._numbers) > 1:
            self._may_raise = False
            raise SecondSignal

    def request(self, number: int) -> None:
        """Act as if a signal had come."""
        self._numbers.append(number)

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._numbers:
            raise Interrupted(self._numbers[0])

    def cancelling(self) -> None:
        """From now on raise SecondSignal at a second signal, including one already received."""
        if len(self._numbers) > 1:
            raise SecondSignal
        self._may_raise = True

    def sleep(self, seconds: float, is_awake: Callable[[], bool] = lambda: False) -> None:
        """Sleep, but not through a signal, nor much longer than until `is_awake`."""
        end = time.monotonic() + seconds
        ask_at = time.monotonic() + _ASK_S
        while not self._numbers and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))
            if time.monotonic() > ask_at:
                if is_awake():
                    return
                ask_at = time.monotonic() + _ASK_S


class Pace:
    """Intervals between `shortest` and `longest` seconds; jitter keeps processes from polling at the same time.

    share: of the time since the last change; a change is noticed after at most so much more.
    """

    def __init__(
        self, shortest: float, longest: float, now: Callable[[], float] = time.monotonic, *, share: float = 0.1
    ) -> None:
        self._shortest, self._longest, self._now, self._share = min(shortest, longest), longest, now, share
        self._changed_at = now()

    def changed(self) -> None:
        """Note that something was submitted or has changed."""
        self._changed_at = self._now()

    def interval(self, poll_s: float = 0.0) -> float:
        """Return how long to wait after a poll that took `poll_s`."""
        wanted = max((self._now() - self._changed_at) * self._share, poll_s * _COST, self._shortest)
        return min(wanted, self._longest) * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
