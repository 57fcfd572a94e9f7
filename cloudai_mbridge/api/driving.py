"""Bring a run to its end without a screen."""

import io
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, cast

from cloudai_mbridge import pipeline
from cloudai_mbridge.completion import completion
from cloudai_mbridge.errors import MBridgeError
from cloudai_mbridge.runner.clock import clock_of
from cloudai_mbridge.runner.lines import PlainObserver
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.tune import choosers_for

Progress = Callable[[str], object]


def drive(prepared: pipeline.Prepared, root: Path, progress: Progress | None) -> None:
    """Drive a written plan to its end and write the report, also after a failure.

    InUse: another process holds it. Paused, Interrupted, ToolFailure: it has not come to its end.
    """
    lines = cast(IO[str], _Lines(progress))
    with completion(prepared.plan, root, partial(print, file=lines)) as ended, driver_lock(root):
        try:
            with PlainObserver(lines, prepared.plan, clock_of(prepared.plan, root)) as observer:
                pipeline.execute(
                    prepared, root, observer, choosers=choosers_for(pipeline.with_defaults(prepared), root)
                )
        except MBridgeError as error:
            error.add_note(f"results: {root}; continue with: open_run({str(root)!r}).resume()")
            with suppress(MBridgeError, OSError, sqlite3.Error):  # the first error is more informative
                ended.report = pipeline.report(root)
            raise
        ended.report = pipeline.report(root)


class _Lines(io.TextIOBase):
    """Calls a function with every line that is printed; one that raises is not called again, and the runs go on."""

    def __init__(self, tell: Progress | None) -> None:
        self._tell = tell

    def write(self, text: str) -> int:
        if self._tell is not None and text.strip():
            try:
                self._tell(text.rstrip("\n"))
            except Exception as error:
                self._tell = None
                warnings.warn(f"progress is not called again, as it raised {error!r}", RuntimeWarning, stacklevel=2)
        return len(text)
