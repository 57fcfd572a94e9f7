"""Install and uninstall everything that tests need on disk before they can run, below one directory."""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.install.installables import (
    EXTRA_PACKAGES,
    ImageInstall,
    Installable,
    Notify,
    PythonEnvInstall,
    RepoInstall,
    remove_leftovers,
)
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.test_definition import NEMO_RUN, GitRepo, TestDefinition

Definitions = Iterable[TestDefinition]


def installables_of(definitions: Definitions, packages: tuple[str, ...] = EXTRA_PACKAGES) -> list[Installable]:
    """Return the installables of the upstream launcher's tests, without duplicates; embedded tests need none.

    packages: contents of the environment in addition to NeMo-Run.
    BadInput: values that git, pip or enroot cannot be given, one line each.
    """
    items: list[Installable] = []
    problems = [
        f"extra packages: {package!r} begins with '-'; pip would take it for an option"
        for package in packages
        if package.startswith("-")
    ]
    for definition in definitions:
        if Launcher.MEGATRON_BRIDGE in _values(definition.cmd_args.launcher):  # type: ignore[attr-defined]
            for key, item in _needed(definition, packages):
                problems += [f"test {definition.name!r}: {line}" for line in item.problems(key)]
                items.append(item)
    if problems:
        raise BadInput("\n".join(dict.fromkeys(problems)))
    # All tests share one clone of a commit, which has the submodules if any test needs them
    clones = [item.repo if isinstance(item, PythonEnvInstall) else item for item in items]
    full = {(repo.url, repo.commit) for repo in clones if isinstance(repo, RepoInstall) and repo.init_submodules}

    def shared(repo: RepoInstall) -> RepoInstall:
        return replace(repo, init_submodules=(repo.url, repo.commit) in full)

    for i, item in enumerate(items):
        if isinstance(item, PythonEnvInstall):
            items[i] = replace(item, repo=shared(item.repo))
        elif isinstance(item, RepoInstall):
            items[i] = shared(item)
    return list(dict.fromkeys(items))


def _needed(definition: TestDefinition, packages: tuple[str, ...]) -> Iterator[tuple[str, Installable]]:
    """Yield the installables of one test, with the key that requires each."""
    for image in _values(definition.cmd_args.container_image):  # type: ignore[attr-defined]
        if (image := image.strip()) and not (image.startswith(("/", ".")) and Path(image).exists()):
            yield "cmd_args.container_image", ImageInstall(image)
    yield "nemo_run_repo", PythonEnvInstall(_repo(definition.nemo_run_repo or NEMO_RUN), packages)
    for index, repo in enumerate(definition.git_repos):
        yield f"git_repos[{index}]", _repo(repo)


def _repo(repo: GitRepo) -> RepoInstall:
    return RepoInstall(repo.url, repo.commit, repo.init_submodules)


def _values(value: Any) -> list[Any]:
    """Return the values of an argument as written: a list is an axis of a sweep."""
    return value if isinstance(value, list) else [value]


def install_all(
    definitions: Definitions, install_path: Path, notify: Notify, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> tuple[str, ...]:
    """Install everything missing; return one line per failure, which does not stop the others.

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
    if not (places := _places(definitions, packages, install_path)):
        notify("nothing to install: no test uses launcher = 'megatron_bridge'")
        return ()
    try:
        install_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"install_path {install_path}: cannot be made ({error.strerror}); choose another") from None
    if not os.access(install_path, os.W_OK | os.X_OK):
        raise BadInput(f"install_path {install_path}: cannot be written; choose another, or ask its owner")
    return _for_each(places, install_path, notify, work)


def uninstall_all(
    definitions: Definitions, install_path: Path, notify: Notify, packages: tuple[str, ...] = EXTRA_PACKAGES
) -> tuple[str, ...]:
    """Remove installed things, but nothing without a marker of ours; return one line per failure.

    BadInput: a value that cannot be used.
    """

    def work(item: Installable, path: Path) -> None:
        if item.uninstall(path):
            notify(f"{item}: removed from {path}")
        elif path.exists():
            notify(f"{item}: {path} was not installed by mbridge; left as it is")
        else:
            notify(f"{item}: not installed")

    install_path = install_path.absolute()
    if not (places := _places(definitions, packages, install_path)):
        notify("nothing to uninstall: no test uses launcher = 'megatron_bridge'")
        return ()
    if not install_path.is_dir():
        notify(f"{install_path}: nothing is installed there")
        return ()
    return _for_each(places, install_path, notify, work)


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
) -> tuple[str, ...]:
    failures: list[str] = []
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
    return tuple(failures)


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
