"""Ctrl-C while modules are imported, of which a traceback would be, and while a process is being started."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """End this process at a SIGINT, with a word: nothing is to be cleaned up. One that is ignored stays so."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not is_main or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def defer_signals() -> Callable[[], None]:
    """Defer the signals that end this process: one that comes while a tool starts would leave it running.

    Return the function that restores the handlers, and raises the deferred signals.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}

    def act() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        for deferred in came:
            signal.raise_signal(deferred)

    return act
