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

from cloudai_mbridge.errors import OK, MBridgeError

CONFIRM_S = 10.0
_SLICE_S = 0.1
_ASK_S = 1.0
_COST = 5.0  # back off from a busy controller: wait at least so many times as long as its answer took
_JITTER = 0.1


class Interrupted(MBridgeError):
    """A signal ended the sweep. Running jobs have been cancelled, except those named in the text."""

    def __init__(self, number: int, left_running: str = "") -> None:
        """left_running: the jobs whose end mbridge did not wait for."""
        left = f"mbridge did not wait; may still run: {left_running}" if left_running else "running jobs were cancelled"
        super().__init__(f"interrupted by {signal.Signals(number).name}; {left}")
        self.number, self.left_running = number, left_running
        self.exit_code = 128 + number


class InterruptedOutside(MBridgeError):
    """A SIGINT came before jobs were submitted or watched, or after all had ended. The text contains the remedy."""

    exit_code = 128 + signal.SIGINT


class SecondSignal(Exception):
    """A second signal came while the jobs of the first were being cancelled."""


class Detached(MBridgeError):
    """The jobs were left to their scheduler. The text counts them, and contains the command that continues."""

    exit_code = OK


class Interrupts:
    """While active, remember the first SIGINT or SIGTERM. A second one is an exception once cancelling has begun.

    Only the main thread receives signals: in another thread nothing is remembered.
    """

    def __init__(
        self, ask: Callable[[str], None] | None = None, *, may_detach: bool = False, detaches: bool = False
    ) -> None:
        """ask: prints the question with which a first SIGINT is answered; only a second one within CONFIRM_S counts.

        may_detach: SIGQUIT detaches, if there is `ask`. detaches: detach once everything possible is submitted.
        """
        self.detaches = detaches
        self._ask, self._may_detach = ask, may_detach
        self._numbers: list[int] = []
        self._may_raise = self._has_quit = self._must_ask = self._was_raised = False
        self._asked_at = -CONFIRM_S

    def __enter__(self) -> Self:
        handlers = {signal.SIGINT: self._remember, signal.SIGTERM: self._remember}
        if self._ask and self._may_detach:
            handlers[signal.SIGQUIT] = self._quit
        if threading.current_thread() is not threading.main_thread():
            handlers = {}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._ask and number == signal.SIGINT and not self._numbers and now - self._asked_at >= CONFIRM_S:
            self._asked_at, self._must_ask = now, True
            return
        self._numbers.append(number)
        if self._may_raise and len(self._numbers) > 1:
            self._may_raise = False
            raise SecondSignal

    def _quit(self, number: int, frame: FrameType | None) -> None:
        self._has_quit = True

    def _answer(self) -> None:
        """Print the question, outside of the handler: that may have interrupted another print."""
        if not self._must_ask or self._ask is None:
            return
        self._must_ask, self._asked_at = False, time.monotonic()
        leave = "; Ctrl-\\ detaches and leaves them" if self._may_detach else ""
        self._ask(f"press Ctrl-C again within {CONFIRM_S:.0f} s to cancel the jobs{leave}")

    def request(self, number: int) -> None:
        """Act as if a signal had come."""
        self._numbers.append(number)

    def check(self) -> None:
        """Raise Interrupted if a signal has come, Detached after SIGQUIT; once: then everything is being ended."""
        self._answer()
        if self._was_raised or not (self._numbers or self._has_quit):
            return
        self._was_raised = True
        if self._numbers:
            raise Interrupted(self._numbers[0])
        raise Detached

    def cancelling(self) -> None:
        """From now on raise SecondSignal at a second signal, including one already received."""
        if len(self._numbers) > 1:
            raise SecondSignal
        self._may_raise = True

    def sleep(self, seconds: float, is_awake: Callable[[], bool] = lambda: False) -> None:
        """Sleep, but not through a signal, nor much longer than until `is_awake`."""
        end = time.monotonic() + seconds
        ask_at = time.monotonic() + _ASK_S
        while not self._numbers and not self._has_quit and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))
            self._answer()
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
