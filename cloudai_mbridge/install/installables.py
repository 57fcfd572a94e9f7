"""What tests need on disk before they can run."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.install.git import RepoInstall
from cloudai_mbridge.install.names import (
    enroot_uri,
    problem_of_commit,
    problem_of_image,
    problem_of_requirement,
    problem_of_url,
)
from cloudai_mbridge.install.place import Facts, Installable
from cloudai_mbridge.install.process import run_tool
from cloudai_mbridge.install.python_env import EXTRA_PACKAGES, PythonEnvInstall
from cloudai_mbridge.megatron_bridge.pins import image_path
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.test_definition import NEMO_RUN, GitRepo, MegatronBridgeTestDefinition


@dataclass(frozen=True)
class ImageInstall(Installable):
    """A container image as a squashfs file; credentials come from enroot's own .credentials file."""

    url: str

    def __str__(self) -> str:
        return f"image {self.url}"

    def place(self, install_path: Path) -> Path:
        return image_path(install_path, self.url)

    @property
    def identity(self) -> Facts:
        return {"kind": "image", "url": enroot_uri(self.url)}

    def build(self, payload: Path, path: Path) -> Facts:
        """Import, and trust the file rather than the exit code."""
        remedy = "run where enroot is installed, or import the image elsewhere and let container_image name the file"
        run_tool("enroot", "import", "-o", payload, enroot_uri(self.url), env=os.environ, missing=remedy)
        if not payload.is_file():
            raise ToolFailure("enroot succeeded but wrote no image")
        return {}


def installables_of(
    definitions: Iterable[MegatronBridgeTestDefinition],
    packages: tuple[str, ...] = EXTRA_PACKAGES,
    exists: Callable[[Path], bool] = Path.exists,
) -> list[Installable]:
    """Return what the tests of the upstream launcher need, each once; embedded tests need nothing.

    Args:
        packages: what the environment holds beside NeMo-Run.
        exists: tells which container images are files already.

    Raises:
        BadInput: values that git, pip or enroot cannot be given, one line each.
    """
    items: list[Installable] = []
    problems: list[str] = [f"extra packages: {p}" for p in map(problem_of_requirement, packages) if p]
    for definition in definitions:
        if Launcher.MEGATRON_BRIDGE in _values(definition.cmd_args.launcher):  # type: ignore[attr-defined]
            needed = dict(_needed(definition, packages, exists))
            problems += [f"test {definition.name!r}: {line}" for line in _problems(needed)]
            items += needed.values()
    if problems:
        raise BadInput("\n".join(dict.fromkeys(problems)))
    return list(dict.fromkeys(_with_submodules(items)))


def _needed(
    definition: MegatronBridgeTestDefinition, packages: tuple[str, ...], exists: Callable[[Path], bool]
) -> Iterator[tuple[str, Installable]]:
    """Yield what one test needs, with the key that says so."""
    for image in _values(definition.cmd_args.container_image):  # type: ignore[attr-defined]
        if (image := image.strip()) and not (image.startswith(("/", ".")) and exists(Path(image))):
            yield f"cmd_args.container_image {image}", ImageInstall(image)
    nemo_run = definition.nemo_run_repo or NEMO_RUN
    yield "nemo_run_repo", PythonEnvInstall(_repo(nemo_run), packages)
    for index, repo in enumerate(definition.git_repos):
        yield f"git_repos[{index}]", _repo(repo)


def _repo(repo: GitRepo) -> RepoInstall:
    return RepoInstall(repo.url, repo.commit, repo.init_submodules)


def _values(value: Any) -> list[Any]:
    """Return the values of an argument as written: a list is an axis of a sweep."""
    return value if isinstance(value, list) else [value]


def _problems(needed: dict[str, Installable]) -> Iterator[str]:
    for key, item in needed.items():
        if isinstance(item, ImageInstall) and (problem := problem_of_image(item.url)):
            yield f"cmd_args.container_image: {problem}"
        if (repo := _repo_of(item)) is None:
            continue
        if problem := problem_of_url(repo.url):
            yield f"{key}.url: {problem}"
        if problem := problem_of_commit(repo.commit):
            yield f"{key}.commit: {problem}"


def _with_submodules(items: list[Installable]) -> Iterator[Installable]:
    """Give a repository its submodules everywhere if any test wants them: there is one clone for all."""
    full = {(repo.url, repo.commit) for item in items if (repo := _repo_of(item)) and repo.init_submodules}
    for item in items:
        if (repo := _repo_of(item)) is None:
            yield item
        else:
            repo = replace(repo, init_submodules=(repo.url, repo.commit) in full)
            yield replace(item, repo=repo) if isinstance(item, PythonEnvInstall) else repo


def _repo_of(item: Installable) -> RepoInstall | None:
    if isinstance(item, PythonEnvInstall):
        return item.repo
    return item if isinstance(item, RepoInstall) else None
