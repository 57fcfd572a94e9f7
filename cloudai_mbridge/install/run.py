"""Install and uninstall everything that tests need below one directory."""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.install.git import RepoInstaller
from cloudai_mbridge.install.installables import (
    EXTRA_PACKAGES,
    ImageInstall,
    Installable,
    PythonEnvInstall,
    RepoInstall,
    installables_of,
)
from cloudai_mbridge.install.names import enroot_uri
from cloudai_mbridge.install.place import Facts, Installer, Notify, remove_leftovers
from cloudai_mbridge.install.process import run_tool
from cloudai_mbridge.install.python_env import PythonEnvInstaller
from cloudai_mbridge.megatron_bridge.pins import image_path, repo_path, venv_path
from cloudai_mbridge.models.test_definition import MegatronBridgeTestDefinition

Definitions = Iterable[MegatronBridgeTestDefinition]


@dataclass(frozen=True)
class InstallResult:
    """How it went; true if nothing failed. One line per failure, with the tool's own message."""

    num_items: int
    failures: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class _Target:
    item: Installable
    installer: Installer
    path: Path


def install_all(
    definitions: Definitions, install_path: Path, notify: Notify, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> InstallResult:
    """Install what is not there yet; one failure does not stop the others.

    Args:
        packages: what the NeMo-Run environment holds beside NeMo-Run.

    Raises:
        BadInput: a value that cannot be used, or an install_path that cannot be written. Nothing was installed.
    """

    def work(target: _Target) -> None:
        if target.installer.is_installed(target.path):
            return notify(f"{target.item}: already installed")
        notify(f"{target.item}: installing")
        target.installer.install(target.path, notify)
        notify(f"{target.item}: installed in {target.path}")

    install_path = install_path.absolute()
    targets = _targets(installables_of(definitions, packages), install_path)
    if targets:
        _make(install_path)
    return _for_each(targets, install_path, notify, work)


def uninstall_all(
    definitions: Definitions, install_path: Path, notify: Notify, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> InstallResult:
    """Remove what an install put there; leave everything that has no marker of ours.

    Raises:
        BadInput: a value that cannot be used.
    """

    def work(target: _Target) -> None:
        if target.installer.uninstall(target.path):
            notify(f"{target.item}: removed from {target.path}")
        elif target.path.exists():
            notify(f"{target.item}: {target.path} was not installed by mbridge; left as it is")
        else:
            notify(f"{target.item}: not installed")

    install_path = install_path.absolute()
    targets = _targets(installables_of(definitions, packages), install_path)
    if targets and not install_path.is_dir():
        notify(f"{install_path}: nothing is installed there")
        return InstallResult(len(targets), ())
    return _for_each(targets, install_path, notify, work)


def is_everything_installed(
    definitions: Definitions, install_path: Path, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> bool:
    """Return whether nothing would be left to install."""
    targets = _targets(installables_of(definitions, packages), install_path.absolute())
    return all(target.installer.is_installed(target.path) for target in targets)


def _targets(items: list[Installable], install_path: Path) -> list[_Target]:
    """Say how and where each is installed, an environment's repository before it.

    Raises:
        BadInput: two of them would have one place.
    """
    found: dict[Path, _Target] = {}
    for item in items:
        for target in _targets_of(item, install_path):
            if not target.path.absolute().is_relative_to(install_path):
                raise BadInput(f"{target.item}: its path {target.path} is outside {install_path}")
            other = found.setdefault(target.path, target).item
            if other != target.item:
                raise BadInput(f"{target.item} and {other} would both be {target.path}; install one elsewhere")
    return list(found.values())


def _targets_of(item: Installable, install_path: Path) -> Iterator[_Target]:
    match item:
        case RepoInstall():
            yield _Target(item, RepoInstaller(item), repo_path(install_path, item.url, item.commit))
        case PythonEnvInstall():
            yield from _targets_of(item.repo, install_path)
            clone = repo_path(install_path, item.repo.url, item.repo.commit)
            path = venv_path(install_path, item.repo.url, item.repo.commit)
            yield _Target(item, PythonEnvInstaller(item, clone), path)
        case ImageInstall():
            yield _Target(item, ImageInstaller(item), image_path(install_path, item.url))


def _make(install_path: Path) -> None:
    try:
        install_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"install_path {install_path}: cannot be made ({error.strerror}); choose another") from None
    if not os.access(install_path, os.W_OK | os.X_OK):
        raise BadInput(f"install_path {install_path}: cannot be written; choose another, or ask its owner")


def _for_each(
    targets: list[_Target], install_path: Path, notify: Notify, work: Callable[[_Target], None]
) -> InstallResult:
    failures: list[str] = []
    if not targets:
        return InstallResult(0, ())
    with locked(install_path, notify):
        for directory in {target.path.parent for target in targets}:
            remove_leftovers(directory)
        for target in targets:
            try:
                work(target)
            except ToolFailure as error:
                failures.append(f"{target.item}: {error}")
            except OSError as error:
                failures.append(f"{target.item}: {error.filename or target.path}: {error.strerror or error}")
            else:
                continue
            notify(f"{target.item}: failed")
    return InstallResult(len(targets), tuple(failures))


_NAME = ".mbridge-install.lock"


@contextmanager
def locked(directory: Path, notify: Notify) -> Iterator[None]:
    """Hold the directory's lock; it ends with the process. Wait for another holder.

    Some shared file systems have no locks. There the install goes on, and says so.
    """
    descriptor = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, directory, notify)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path, notify: Notify) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify(f"waiting for another install to finish in {directory}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        notify(f"{directory} cannot be locked ({error.strerror}); run one install at a time")


class ImageInstaller(Installer):
    """Imports as a squashfs file; credentials come from enroot's own .credentials file."""

    def __init__(self, item: ImageInstall) -> None:
        self._item = item

    @property
    def identity(self) -> Facts:
        return {"kind": "image", "url": enroot_uri(self._item.url)}

    def build(self, payload: Path, path: Path) -> Facts:
        """Import, and trust the file rather than the exit code."""
        remedy = "run where enroot is installed, or import the image elsewhere and let container_image name the file"
        run_tool("enroot", "import", "-o", payload, enroot_uri(self._item.url), env=os.environ, missing=remedy)
        if not payload.is_file():
            raise ToolFailure("enroot succeeded but wrote no image")
        return {}
