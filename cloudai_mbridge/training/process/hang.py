"""Keep the stacks of a rank that makes no progress: stacks of waiting ranks show the collective, the missing rank's
its place. Standard library only, so that the watch begins before torch loads."""

import faulthandler
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

from cloudai_mbridge.training.errors import ConfigError

TIMEOUT_VARIABLE = "MBRIDGE_HANG_TIMEOUT_S"

_watches: list["HangWatch"] = []  # those inside `with`


def step_done() -> None:
    """Notify the watches of this process that the rank makes progress; does nothing without one."""
    for watch in _watches:
        watch.step_done()


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


class HangWatch:
    """Write the stacks of all threads to `stacks/rank-N.txt` if `timeout_s` pass inside `with` without a step.

    The writer is a C thread that needs no GIL, so it also works while the main thread holds it in a blocking call. The
    process continues; the scheduler or the runner cancels the job. A rank that finishes further steps is watched again,
    and the written stacks stay.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._path = Path("stacks", f"rank-{os.environ.get('RANK', 0)}.txt")
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        if self._timeout_s is None:
            return self
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:  # not worth a training run
            print(f"warning: {error}; no stacks will be kept if this rank hangs", file=sys.stderr)
        self._arm()
        _watches.append(self)
        return self

    def step_done(self) -> None:
        """Restart the timer. It costs some tens of microseconds: call it outside measured intervals."""
        self._arm()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self in _watches:
            _watches.remove(self)
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        self._file = None
        with suppress(OSError):  # an empty file more or less; the directory goes with the last rank's file
            if not self._path.stat().st_size:
                self._path.unlink()
            if kind is None:  # a failed rank may be ahead of a rank that is about to open its file
                self._path.parent.rmdir()

    def _arm(self) -> None:
        if self._timeout_s is not None and self._file is not None:
            faulthandler.dump_traceback_later(self._timeout_s, repeat=False, file=self._file)
