"""Ctrl-C while nothing has begun yet: modules are imported, and a traceback would be about them."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
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
