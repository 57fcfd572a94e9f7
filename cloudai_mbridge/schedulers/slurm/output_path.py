"""Check whether compute nodes may see the directory of the results, as far as this machine knows."""

import re
from pathlib import Path

from cloudai_mbridge.files.text import visible

_MOUNTS = Path("/proc/self/mounts")
_SHARED = frozenset(
    (
        *("afs", "beegfs", "ceph", "cifs", "dvs", "fhgfs", "fuse.ceph", "fuse.glusterfs", "gfs2", "glusterfs", "gpfs"),
        *("lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "wekafs"),
    )
)
_OF_ONE_MACHINE = frozenset(("devtmpfs", "overlay", "ramfs", "squashfs", "tmpfs"))
_OF_EVERY_MACHINE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108


def judge_output_path(output_dir: Path, mounts: str | None = None) -> str:
    """Return a line about the file system of the results: shared, probably not, or not evaluated.

    mounts: as /proc/self/mounts; None: of this machine.
    """
    path = output_dir.absolute()
    try:
        path = path.resolve()
        kind = _kind_of(path, _MOUNTS.read_text(errors="replace") if mounts is None else mounts)
    except (OSError, RuntimeError):
        kind = ""
    where = visible(str(path))
    if kind in _SHARED:
        return f"output path: {where} is on {kind}"
    if kind in _OF_ONE_MACHINE or path.is_relative_to("/proc") or any(map(path.is_relative_to, _OF_EVERY_MACHINE)):
        return (
            f"output path: warning: {where} ({kind or 'unknown file system'}) is probably of this machine alone;"
            " jobs on nodes that do not see it fail: use a shared file system"
        )
    return f"output path: not evaluated: whether the nodes see {where} ({kind or 'unknown file system'})"


def _kind_of(path: Path, mounts: str) -> str:
    """Return the type of the file system at a path: of the longest mount point above it, the last one mounted there."""
    rows = (line.split(" ") for line in mounts.splitlines())
    points = [(Path(_unescaped(row[1])), row[2]) for row in rows if len(row) > 2]
    above = [
        (len(point.parts), number, kind) for number, (point, kind) in enumerate(points) if path.is_relative_to(point)
    ]
    return max(above, default=(0, 0, ""))[2]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
