"""A request to the process that holds a run, to cancel everything: a file, since that may be on another machine."""

import os
from pathlib import Path

from cloudai_mbridge.plan import ROOT_FILES


def request_cancel(root: Path) -> None:
    """Ask; to ask twice is to ask once.

    Raises:
        OSError: the file cannot be made.
    """
    os.close(os.open(_path(root), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))


def is_cancel_requested(root: Path) -> bool:
    """Return whether somebody has asked."""
    return os.path.lexists(_path(root))


def clear_cancel(root: Path) -> None:
    """Take it back."""
    _path(root).unlink(missing_ok=True)


def _path(root: Path) -> Path:
    return root / ROOT_FILES.cancel_request
