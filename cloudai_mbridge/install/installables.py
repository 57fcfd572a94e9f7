"""What tests need on disk before they can run. Pure: definitions in, values out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.install.names import problem_of_commit, problem_of_image, problem_of_requirement, problem_of_url
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.test_definition import NEMO_RUN, GitRepo, MegatronBridgeTestDefinition

# What CloudAI's wrapper installs beside NeMo-Run. wandb is pinned: the launchers of Megatron-Bridge 0.3 to 0.6 call
# wandb.util.generate_id, which 0.18.7 has and 0.31 does not.
EXTRA_PACKAGES = ("wandb==0.18.7", "numpy==1.26.4")


@dataclass(frozen=True)
class RepoInstall:
    """A clone of a repository at a commit, branch or tag."""

    url: str
    commit: str
    init_submodules: bool = False

    def __str__(self) -> str:
        return f"repository {self.url} at {self.commit}"


@dataclass(frozen=True)
class PythonEnvInstall:
    """A virtual environment with the package of a repository and further packages in it."""

    repo: RepoInstall
    packages: tuple[str, ...] = EXTRA_PACKAGES

    def __str__(self) -> str:
        return f"Python environment of {self.repo.url} at {self.repo.commit}"


@dataclass(frozen=True)
class ImageInstall:
    """A container image as a squashfs file."""

    url: str

    def __str__(self) -> str:
        return f"image {self.url}"


Installable = RepoInstall | PythonEnvInstall | ImageInstall


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
        if isinstance(item, ImageInstall):
            if problem := problem_of_image(item.url):
                yield f"cmd_args.container_image: {problem}"
            continue
        repo = item.repo if isinstance(item, PythonEnvInstall) else item
        if problem := problem_of_url(repo.url):
            yield f"{key}.url: {problem}"
        if problem := problem_of_commit(repo.commit):
            yield f"{key}.commit: {problem}"


def _with_submodules(items: list[Installable]) -> Iterator[Installable]:
    """Give a repository its submodules everywhere if any test wants them: there is one clone for all."""
    repos = [item for item in items if isinstance(item, RepoInstall)]
    repos += [item.repo for item in items if isinstance(item, PythonEnvInstall)]
    full = {(repo.url, repo.commit) for repo in repos if repo.init_submodules}

    def completed(repo: RepoInstall) -> RepoInstall:
        return RepoInstall(repo.url, repo.commit, (repo.url, repo.commit) in full)

    for item in items:
        match item:
            case RepoInstall():
                yield completed(item)
            case PythonEnvInstall():
                yield PythonEnvInstall(completed(item.repo), item.packages)
            case ImageInstall():
                yield item
