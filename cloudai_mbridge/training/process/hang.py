"""Keep the stacks of a rank that makes no progress: stacks of waiting ranks show the collective, the missing rank's
its place. Standard library only, so that the watch begins before torch loads."""

import faulthandler
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cloudai_mbridge.training.errors import ConfigError

TIMEOUT_VARIABLE = "MBRIDGE_HANG_TIMEOUT_S"
# Seconds of the epoch at which the job began: who watches it counts from then on, and the first step may take long
SINCE_VARIABLE = "MBRIDGE_HANG_SINCE"
_LEAST_SHARE = 1 / 50  # of the timeout: until the stacks of a rank that begins when the time is over

_timers: list[Callable[[], None]] = []  # start the timers of the watches inside `with` again


def step_done() -> None:
    """Notify the watches of this process that the rank makes progress; does nothing without one.

    It costs some tens of microseconds: call it outside measured intervals.
    """
    for start in _timers:
        start()


def hang_timeout_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds without a step after which the stacks are kept; `None`: never.

    Raises ConfigError: not a positive number, or too large for a timer.
    """
    if not (text := environment.get(TIMEOUT_VARIABLE, "")):
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:  # false for nan as well
        raise ConfigError(
            f"{TIMEOUT_VARIABLE}: {text!r} is not a positive number of seconds; unset it to keep no stacks"
        )
    return timeout_s


def seconds_before(environment: Mapping[str, str], now: float) -> float:
    """Return the seconds from the job's begin to now; 0 if unknown. now: seconds of the epoch."""
    with suppress(ValueError):
        before_s = now - float(environment.get(SINCE_VARIABLE, ""))
        return before_s if 0 < before_s < math.inf else 0.0
    return 0.0


@contextmanager
def hang_watch(timeout_s: float | None, before_s: float = 0.0) -> Iterator[None]:
    """Write the stacks of all threads to `stacks/rank-N.txt` if `timeout_s` pass inside `with` without a step.

    before_s: seconds that have passed already without a step. What is left is short then, and the stacks are written
    again and again until the first step: the start-up goes on.

    The writer is a C thread that needs no GIL, so it also works while the main thread holds it in a blocking call. The
    process continues; the scheduler or the runner cancels the job. A rank that finishes further steps is watched again,
    and the written stacks stay.
    """
    file = None
    path = Path("stacks", f"rank-{os.environ.get('RANK', 0)}.txt")
    if timeout_s is not None:
        try:
            path.parent.mkdir(exist_ok=True)
            file = path.open("w", encoding="utf-8")
        except OSError as error:  # not worth a training run
            print(f"warning: {error}; no stacks will be kept if this rank hangs", file=sys.stderr)
    if timeout_s is None or file is None:
        yield
        return
    start = partial(faulthandler.dump_traceback_later, timeout_s, repeat=False, file=file)
    left_s = max(timeout_s - before_s, timeout_s * _LEAST_SHARE)
    faulthandler.dump_traceback_later(left_s, repeat=left_s < timeout_s, file=file)
    _timers.append(start)
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        _timers.remove(start)
        faulthandler.cancel_dump_traceback_later()
        file.close()
        with suppress(OSError):  # an empty file more or less; the directory goes with the last rank's file
            if not path.stat().st_size:
                path.unlink()
            if not has_failed:  # a failed rank may be ahead of a rank that is about to open its file
                path.parent.rmdir()
