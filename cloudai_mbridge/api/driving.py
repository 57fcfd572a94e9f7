"""Bring a run to its end without a screen."""

import io
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole
from cloudai_mbridge.commands.run.drive import choosers_for
from cloudai_mbridge.commands.run.live_view import observer_for
from cloudai_mbridge.completion import completion
from cloudai_mbridge.errors import MBridgeError
from cloudai_mbridge.runner.lock import driver_lock

Progress = Callable[[str], object]


def drive(prepared: pipeline.Prepared, root: Path, progress: Progress | None) -> None:
    """Bring what was written to its end and write the report, also if that fails.

    InUse: another process holds it. Paused, Interrupted, ToolFailure: it has not come to its end.
    """
    console = SteadyConsole(file=cast(TextIO, _Lines(progress)), force_terminal=False, highlight=False)
    with completion(prepared.plan, root, console.print_line) as ended, driver_lock(root):
        try:
            with observer_for(console, prepared.plan, root) as observer:
                pipeline.execute(prepared, root, observer, choosers=choosers_for(prepared, root))
        except MBridgeError as error:
            error.add_note(f"results: {root}; continue with: open_run({str(root)!r}).resume()")
            with suppress(MBridgeError, OSError, sqlite3.Error):  # the first error says more
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
