"""Relative paths of this machine: resolved against the current directory of the command, as in CloudAI."""

import re
from pathlib import Path

# Slurm expands %j and the like in the whole path of a job's output, including its working directory; any backslash in
# it turns expansion off
_SLURM_EXPANDS = re.compile(r"%[%A-Za-z0-9]|\\")


def slurm_pattern_in(path: str) -> str | None:
    """Return the pattern that Slurm would expand in a job's output path, which fails the job; None if safe."""
    found = _SLURM_EXPANDS.search(path)
    return found[0] if found else None


def absolute(path: str) -> str:
    """Return a path that means the same in every directory. `$NAME/x` and `~/x` are left to the shell."""
    if path.startswith(("/", "$", "~")) or not path:
        return path
    here = str(Path.cwd()).replace("$", r"\$")
    return str(Path(here) / path)


def absolute_mount(mount: str) -> str:
    """Return SOURCE:TARGET[:FLAGS] with an absolute source."""
    source, colon, rest = mount.strip().partition(":")
    return f"{absolute(source)}:{rest}" if colon else mount
