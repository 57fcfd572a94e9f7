"""Keep an ended attempt's files apart, so that the next attempt starts in a clean directory."""

import itertools
from pathlib import Path

from cloudai_mbridge.plan import POINT_FILES

_LEFT_BEHIND = (
    POINT_FILES.stdout,
    POINT_FILES.stderr,
    POINT_FILES.started,
    POINT_FILES.exit_code,
    POINT_FILES.stacks,
    POINT_FILES.launcher_log,
    POINT_FILES.slurm_job_id,
    POINT_FILES.nemorun_home,
    POINT_FILES.report,
)


def put_aside(directory: Path, number: int) -> None:
    """Move what attempt `number` has left into a directory of its own. Safe to repeat after a crash in its middle."""
    kept = directory / POINT_FILES.attempt.format(number)
    for name in _LEFT_BEHIND:
        if (source := directory / name).exists():
            kept.mkdir(exist_ok=True)
            source.rename(_free(kept / name))


def _free(path: Path) -> Path:
    """Return the path, or the first of path.1, path.2, ... that is free: an unwanted job may have written too."""
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in itertools.chain([path], names) if not name.exists())
