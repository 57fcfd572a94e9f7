"""Clones, environments and images that tests need on disk before they can run."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.install.git import RepoInstall
from cloudai_mbridge.install.place import Facts, Installable
from cloudai_mbridge.install.process import run_tool
from cloudai_mbridge.install.python_env import EXTRA_PACKAGES, PythonEnvInstall
from cloudai_mbridge.megatron_bridge.pins import image_path
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.test_definition import NEMO_RUN, GitRepo, TestDefinition
from cloudai_mbridge.training.credentials.scrub import redacted


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
    definitions: Iterable[TestDefinition],
    packages: tuple[str, ...] = EXTRA_PACKAGES,
    exists: Callable[[Path], bool] = Path.exists,
) -> list[Installable]:
    """Return the installables of the upstream launcher's tests, without duplicates; embedded tests need none.

    packages: contents of the environment in addition to NeMo-Run. exists: whether a container image is a file already.
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
    definition: TestDefinition, packages: tuple[str, ...], exists: Callable[[Path], bool]
) -> Iterator[tuple[str, Installable]]:
    """Yield the installables of one test, with the key that requires each."""
    for image in _values(definition.cmd_args.container_image):  # type: ignore[attr-defined]
        if (image := image.strip()) and not (image.startswith(("/", ".")) and exists(Path(image))):
            yield f"cmd_args.container_image {image}", ImageInstall(image)
    yield "nemo_run_repo", PythonEnvInstall(_repo(definition.nemo_run_repo or NEMO_RUN), packages)
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
    """Enable a repository's submodules for all tests if any test needs them: all share one clone."""
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


# Characters that git forbids in ref names, and a leading + or ^, which have a meaning in a refspec
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|^[+/]|[/.]$|//|\.lock$")
_DASH_HOST = re.compile(r"(?:://|@)-")
_HELPER = re.compile(r"[A-Za-z0-9+.-]+::")
_SCP_LIKE = re.compile(r"(?:[^\s/:@]+@)?[^\s/:@]+:.+")
_CREDENTIAL = "carries a credential; take it out and let git's credential helper or ~/.netrc supply it"
_SCHEMES = ("https", "http", "ssh", "git", "file")
_IMAGE = re.compile(
    r"(?:(?P<user>[A-Za-z0-9$._-]+)@)?"
    r"(?:(?P<registry>[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?)#)?"
    r"(?P<image>[a-z0-9][a-z0-9/._-]*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._:-]*))?"
)


def problem_of_url(url: str) -> str | None:
    """Return why git cannot be given this url. Credentials are rejected: they would show in argv and on disk."""
    shown = redacted(url)
    if re.search(r"[\x00-\x20\x7f]", url) or not url:
        return f"{shown!r} is empty or holds blanks or control characters; write the repository's address"
    if url.startswith("-"):
        return f"{shown!r} begins with '-'; git would take it for an option"
    if _HELPER.match(url):
        return f"{shown!r} names a remote helper, which may run anything; use one of {', '.join(_SCHEMES)}"
    if "://" in url:
        return _problem_of_scheme(url)
    if re.match(r"[^/@]*:[^/@]*@", url):
        return f"{shown!r} {_CREDENTIAL}"
    if not url.startswith("/") and not _SCP_LIKE.fullmatch(url):
        return f"{shown!r} is neither an address nor a full path; write https://..., git@host:path or /path"
    return f"{shown!r} has a host that begins with '-'" if _DASH_HOST.search(url) else None


def _problem_of_scheme(url: str) -> str | None:
    shown = redacted(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{shown!r} is not an address"
    if parts.password is not None or (parts.scheme in ("http", "https") and parts.username is not None):
        return f"{shown!r} {_CREDENTIAL}"
    if parts.scheme not in _SCHEMES:
        return f"{shown!r} has the scheme {parts.scheme!r}; use one of {', '.join(_SCHEMES)}"
    return f"{shown!r} has a host that begins with '-'" if _DASH_HOST.search(url) else None


def problem_of_commit(commit: str) -> str | None:
    """Return why git cannot be given this commit, branch or tag."""
    if commit.startswith("-"):
        return f"{commit!r} begins with '-'; git would take it for an option"
    if not commit or _NO_REF.search(commit):
        return f"{commit!r} is not the name of a commit, branch or tag; write one as git shows it"
    return None


def problem_of_image(image: str) -> str | None:
    """Return why enroot cannot be given this image."""
    if image.startswith(("/", ".")):
        return f"{image!r}: no such image file; check the path"
    if re.match(r"(?:docker://)?[^/#]*:[^/#]*@", image) and "@sha256:" not in image:
        return "the image's name carries a credential; take it out and put it into enroot's .credentials file"
    if _parse_image(image):
        return None
    return f"{redacted(image)!r} is not an image such as nvcr.io#nvidia/nemo:26.02.00, nor a file"


def problem_of_requirement(requirement: str) -> str | None:
    """Return why pip cannot be given this requirement."""
    return f"{requirement!r} begins with '-'; pip would take it for an option" if requirement.startswith("-") else None


def enroot_uri(image: str) -> str:
    """Return docker://[USER@][REGISTRY#]IMAGE[:TAG] for an image in this or in Docker's spelling, registry/image:tag.

    Enroot takes everything before the first # for the registry; the default is Docker Hub.
    """
    if (match := _parse_image(image)) is None:
        raise ValueError(f"{image!r} is not an image")
    user = f"{match['user']}@" if match["user"] else ""
    registry = f"{match['registry']}#" if match["registry"] else ""
    tag = f":{match['tag']}" if match["tag"] else ""
    return f"docker://{user}{registry}{match['image']}{tag}"


def _parse_image(image: str) -> re.Match[str] | None:
    name = image.removeprefix("docker://").replace("@sha256:", ":sha256:")
    user, at, rest = name.rpartition("@")
    first, slash, path = rest.partition("/")
    if "#" not in rest and slash and ("." in first or ":" in first or first == "localhost"):
        rest = f"{first}#{path}"
    return _IMAGE.fullmatch(user + at + rest)
