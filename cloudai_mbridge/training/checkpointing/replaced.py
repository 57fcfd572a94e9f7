"""A complete checkpoint stays until the one that replaces it is complete. Rank 0 only.

The rerun machine saves an iteration that may just have been saved, and a run that went back saves some again.
"""

import os
import shutil
from pathlib import Path

from cloudai_mbridge.training.checkpointing.layout import is_complete

_SUFFIX = ".replaced"


def make_way(directory: Path) -> None:
    """Make an empty `directory`; a complete checkpoint in it is set aside, the leftovers of a killed save removed."""
    restore(directory.parent)
    if is_complete(directory):
        os.replace(directory, _aside(directory))
    elif directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def drop(directory: Path) -> None:
    """Remove what was set aside for `directory`, which is complete now."""
    if _aside(directory).exists():
        shutil.rmtree(_aside(directory), ignore_errors=True)


def restore(root: Path) -> None:
    """Put back under `root` what was set aside for a save that never came to its end."""
    for aside in root.glob(f"iter_*{_SUFFIX}"):
        directory = aside.with_name(aside.name.removesuffix(_SUFFIX))
        if is_complete(directory) or not is_complete(aside):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(aside, directory)


def _aside(directory: Path) -> Path:
    return directory.with_name(directory.name + _SUFFIX)
