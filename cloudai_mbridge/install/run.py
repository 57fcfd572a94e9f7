"""Install and uninstall everything that tests need below one directory."""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.install.installables import installables_of
from cloudai_mbridge.install.place import Installable, Notify, remove_leftovers
from cloudai_mbridge.install.python_env import EXTRA_PACKAGES, PythonEnvInstall
from cloudai_mbridge.models.test_definition import TestDefinition

Definitions = Iterable[TestDefinition]


@dataclass(frozen=True)
class InstallResult:
    """How it went; true if nothing failed. One line per failure, with the tool's own message."""

    num_items: int
    failures: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.failures


def install_all(
    definitions: Definitions, install_path: Path, notify: Notify, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> InstallResult:
    """Install everything missing; one failure does not stop the others.

    packages: contents of the NeMo-Run environment in addition to NeMo-Run.
    BadInput: a value that cannot be used, or an install_path that cannot be written. Nothing was installed.
    """

    def work(item: Installable, path: Path) -> None:
        if item.is_installed(path):
            return notify(f"{item}: already installed")
        notify(f"{item}: installing")
        item.install(path, notify)
        notify(f"{item}: installed in {path}")

    install_path = install_path.absolute()
    if places := _places(definitions, packages, install_path):
        try:
            install_path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"install_path {install_path}: cannot be made ({error.strerror}); choose another") from None
        if not os.access(install_path, os.W_OK | os.X_OK):
            raise BadInput(f"install_path {install_path}: cannot be written; choose another, or ask its owner")
    return _for_each(places, install_path, notify, work)


def uninstall_all(
    definitions: Definitions, install_path: Path, notify: Notify, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> InstallResult:
    """Remove installed things, but nothing without a marker of ours; BadInput: a value that cannot be used."""

    def work(item: Installable, path: Path) -> None:
        if item.uninstall(path):
            notify(f"{item}: removed from {path}")
        elif path.exists():
            notify(f"{item}: {path} was not installed by mbridge; left as it is")
        else:
            notify(f"{item}: not installed")

    install_path = install_path.absolute()
    places = _places(definitions, packages, install_path)
    if places and not install_path.is_dir():
        notify(f"{install_path}: nothing is installed there")
        return InstallResult(len(places), ())
    return _for_each(places, install_path, notify, work)


def is_everything_installed(
    definitions: Definitions, install_path: Path, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> bool:
    """Return whether nothing is left to install."""
    places = _places(definitions, packages, install_path.absolute())
    return all(item.is_installed(path) for path, item in places.items())


def _places(definitions: Definitions, packages: tuple[str, ...], install_path: Path) -> dict[Path, Installable]:
    """Return path -> installable, an environment's repository before it; BadInput if two would share a path."""
    found: dict[Path, Installable] = {}
    for needed in installables_of(definitions, packages):
        for item in (needed.repo, needed) if isinstance(needed, PythonEnvInstall) else (needed,):
            path = item.place(install_path)
            if not path.absolute().is_relative_to(install_path):
                raise BadInput(f"{item}: its path {path} is outside {install_path}")
            if (other := found.setdefault(path, item)) != item:
                raise BadInput(f"{item} and {other} would both be {path}; install one elsewhere")
    return found


def _for_each(
    places: Mapping[Path, Installable], install_path: Path, notify: Notify, work: Callable[[Installable, Path], None]
) -> InstallResult:
    failures: list[str] = []
    if not places:
        return InstallResult(0, ())
    with locked(install_path, notify):
        for directory in {path.parent for path in places}:
            remove_leftovers(directory)
        for path, item in places.items():
            try:
                work(item, path)
            except ToolFailure as error:
                failures.append(f"{item}: {error}")
            except OSError as error:
                failures.append(f"{item}: {error.filename or path}: {error.strerror or error}")
            else:
                continue
            notify(f"{item}: failed")
    return InstallResult(len(places), tuple(failures))


@contextmanager
def locked(directory: Path, notify: Notify) -> Iterator[None]:
    """Hold the directory's lock; it ends with the process. Wait for another holder.

    Some shared file systems have no locks. There the install continues, and reports it.
    """
    with open(os.open(directory / ".mbridge-install.lock", os.O_RDWR | os.O_CREAT, 0o666), "rb") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                notify(f"waiting for another install to finish in {directory}")
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            notify(f"{directory} cannot be locked ({error.strerror}); run one install at a time")
        yield
