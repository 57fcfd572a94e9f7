"""Index of this user's runs: one path per line, for commands that find a run by its name.

It is a convenience: write failures are ignored, and readers ignore missing directories.
"""

import contextlib
import os
from pathlib import Path

from cloudai_mbridge.files.regular import read_regular

_MOST_READ = 1000  # the last entries; each costs a file-system access


def index_path() -> Path | None:
    """Return the index, in the user's XDG state directory; None if the user has no such directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG specification ignores relative paths
        state = os.path.expanduser("~/.local/state")
    return Path(state, "mbridge", "runs.txt") if os.path.isabs(state) else None


def record_run(root: Path) -> None:
    """Add a run's directory to the index, if that is possible."""
    if (path := index_path()) is None or "\n" in str(root):
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(os.fsencode(root) + b"\n")


def recorded_runs() -> list[Path]:
    """Return the directories in the index; they need not exist."""
    path, lines = index_path(), list[bytes]()
    if path is not None:
        with contextlib.suppress(OSError):
            lines = read_regular(path).split(b"\n")[-_MOST_READ - 1 : -1]
    return [Path(os.fsdecode(line)) for line in lines if os.path.isabs(line) and b"\0" not in line]
