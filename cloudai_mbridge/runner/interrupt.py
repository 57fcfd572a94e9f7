"""Signals that end a sweep, taken at safe points only: never between a submission and its entry in the journal."""

import signal
import time
from types import FrameType, TracebackType
from typing import Self

from cloudai_mbridge.errors import MBridgeError

_SLICE_S = 0.1


class Interrupted(MBridgeError):
    """A signal ended the sweep; what was running has been cancelled."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}; running jobs were cancelled")
        self.exit_code = 128 + number


class Interrupts:
    """While active, remember the first SIGINT or SIGTERM; a second one ends the process at once."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._number: int | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._remember) for number in self._SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        for each in self._SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self._number is not None:
            raise Interrupted(self._number)

    def sleep(self, seconds: float) -> None:
        """Sleep, but not through a signal."""
        end = time.monotonic() + seconds
        while self._number is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_S))
