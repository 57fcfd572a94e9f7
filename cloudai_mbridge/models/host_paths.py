"""Relative paths of this machine: from where the command was started, as in CloudAI."""

from pathlib import Path


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
