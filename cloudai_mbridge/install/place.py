"""Put a clone, an environment or an image into its place atomically, with a marker that identifies it.

Work happens in a directory next to the place, so that a kill leaves nothing at the place itself. A directory contains
its marker. A file has it next to it, written first and with the file's size and time: it is valid for no other file.
A file or directory without a marker is not ours: it is moved aside, never removed.
"""

import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import ToolFailure

MARKER = ".mbridge-install.json"
_PARTIAL = ".mbridge-partial-"
_VERSION = 1

Facts = Mapping[str, Any]
Notify = Callable[[str], None]


class Installable(ABC):
    """An installable item; subclasses define its content, place and installation."""

    @abstractmethod
    def place(self, install_path: Path) -> Path:
        """Return its path below `install_path`."""

    @property
    @abstractmethod
    def identity(self) -> Facts:
        """The marker's fields that identify this thing."""

    @abstractmethod
    def build(self, payload: Path, path: Path) -> Facts:
        """Make the thing at `payload`, for use at `path`; return facts for the marker."""

    def accepts(self, marker: Facts, path: Path) -> bool:
        """Return whether the thing that the marker describes can be used as is."""
        return all(marker.get(key) == value for key, value in self.identity.items())

    def is_same(self, marker: Facts) -> bool:
        """Return whether the marker describes this thing, even if outdated."""
        return all(marker.get(key) == self.identity.get(key) for key in ("kind", "url", "commit"))

    def is_installed(self, path: Path) -> bool:
        """Return whether the thing is complete at its place."""
        marker = read_marker(path)
        return marker is not None and self.accepts(marker, path)

    def install(self, path: Path, notify: Notify = lambda line: None) -> None:
        """Make the thing and move it into its place, unless it is there; replace an outdated one of ours.

        ToolFailure: it cannot be made, or another thing of ours is at its place.
        """
        if self.is_installed(path):
            return
        if (marker := read_marker(path)) is not None and not self.is_same(marker):
            raise ToolFailure(f"{path} is the {marker.get('kind')} of {marker.get('url')}; uninstall that first")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _workshop(path.parent) as workshop:
            payload = workshop / "payload"
            facts = self.build(payload, path)
            _write_marker(payload, path, {"version": _VERSION, **self.identity, **facts})
            if marker is not None:
                path.rename(workshop / "outdated")
            elif os.path.lexists(path):
                names = (path.with_name(f"{path.name}.set-aside-{n}") for n in range(1, 1_000_000))
                aside = next(name for name in names if not os.path.lexists(name))
                path.rename(aside)
                notify(f"{path} was not installed by mbridge; moved to {aside.name}")
            payload.rename(path)

    def uninstall(self, path: Path) -> bool:
        """Remove the thing if its marker identifies it as ours; return whether it was removed."""
        marker = read_marker(path)
        if marker is None or not self.is_same(marker):
            return False
        with _workshop(path.parent) as workshop:
            path.rename(workshop / "removed")
            _sidecar(path).unlink(missing_ok=True)
        return True


def read_marker(path: Path) -> Facts | None:
    """Return the marker of the thing at `path`; None if it is missing, invalid or of another file."""
    if path.is_symlink() or not path.exists():
        return None
    try:
        marker = json.loads((path / MARKER if path.is_dir() else _sidecar(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict) or marker.get("version") != _VERSION:
        return None
    return marker if path.is_dir() or marker.get("file") == _fingerprint(path) else None


def remove_leftovers(directory: Path) -> None:
    """Remove leftovers of killed installs from a directory. The caller holds the lock: no other install works there."""
    for left in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def _write_marker(payload: Path, path: Path, marker: dict[str, Any]) -> None:
    """Write by renaming: a repository may hold a symbolic link under the marker's name."""
    target = payload / MARKER
    if not payload.is_dir():
        target, marker = _sidecar(path), {**marker, "file": _fingerprint(payload)}
    draft = payload.with_name("marker")
    draft.write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    draft.replace(target)


def _sidecar(path: Path) -> Path:
    return path.with_name(f".{path.name}{MARKER}")


def _fingerprint(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, int(status.st_mtime)]


@contextmanager
def _workshop(directory: Path) -> Iterator[Path]:
    """Yield a new directory that is gone afterwards, whatever is in it."""
    workshop = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=directory))
    try:
        yield workshop
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
