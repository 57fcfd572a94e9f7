"""Repositories, Python environments and container images, each put into its place atomically.

A thing has a marker that identifies it. Work happens in a directory next to the place, so that a kill leaves nothing at
the place itself. A directory contains its marker. A file has it next to it, written first and with the file's size and
time: it is valid for no other file. A file or directory without a marker is not ours: it is moved aside, never removed.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.process import run_tool
from cloudai_mbridge.megatron_bridge.release import image_path, repo_path, venv_path
from cloudai_mbridge.training.credentials.scrub import redacted

MARKER = ".mbridge-install.json"
# Packages that CloudAI's wrapper adds to NeMo-Run. wandb is pinned: the launchers of Megatron-Bridge 0.3 to 0.6 call
# wandb.util.generate_id, which 0.18.7 has and 0.31 does not.
EXTRA_PACKAGES = ("wandb==0.18.7", "numpy==1.26.4")
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

    @abstractmethod
    def problems(self, key: str) -> Iterator[str]:
        """Yield why a tool cannot be given the values of `key`, which requires the thing."""

    def accepts(self, marker: Facts, path: Path) -> bool:
        """Return whether the thing that the marker describes can be used as is."""
        return all(marker.get(key) == value for key, value in self.identity.items())

    def is_same(self, marker: Facts) -> bool:
        """Return whether the marker describes this thing, even if outdated."""
        return all(marker.get(key) == self.identity.get(key) for key in ("kind", "url", "commit"))

    def is_installed(self, path: Path) -> bool:
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


# Set if mbridge is started from a git hook or alias; they would redirect git to that repository
_CALLERS_REPOSITORY = {
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
    *("GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_SHALLOW_FILE"),
}
_SCHEMES = ("https", "http", "ssh", "git", "file")
_SCP_LIKE = re.compile(r"(?:[^\s/:@]+@)?[^\s/:@]+:.+")
# Characters that git forbids in ref names, and a leading + or ^, which have a meaning in a refspec
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|^[+/]|[/.]$|//|\.lock$")


@dataclass(frozen=True)
class RepoInstall(Installable):
    """A clone of a repository at a commit, branch or tag.

    It has no history where the server allows that; credentials come from git's own helpers.
    """

    url: str
    commit: str
    init_submodules: bool = False

    def __str__(self) -> str:
        return f"repository {self.url} at {self.commit}"

    def place(self, install_path: Path) -> Path:
        return repo_path(install_path, self.url, self.commit)

    @property
    def identity(self) -> Facts:
        return {"kind": "repository", "url": self.url, "commit": self.commit}

    def problems(self, key: str) -> Iterator[str]:
        if problem := problem_of_url(self.url):
            yield f"{key}.url: {problem}"
        if problem := problem_of_commit(self.commit):
            yield f"{key}.commit: {problem}"

    def accepts(self, marker: Facts, path: Path) -> bool:
        has_submodules = bool(marker.get("submodules")) or not self.init_submodules
        return super().accepts(marker, path) and has_submodules and (path / ".git").exists()

    def build(self, payload: Path, path: Path) -> Facts:
        """Clone; a branch or tag is resolved now and not updated later."""
        payload.mkdir()
        _git(payload, "init", "--quiet")
        _git(payload, "remote", "add", "--", "origin", self.url)
        _git(payload, "checkout", "--quiet", "--detach", self._fetch(payload))
        if self.init_submodules:
            _git(payload, "submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1")
        exclude = payload / ".git" / "info" / "exclude"
        exclude.parent.mkdir(exist_ok=True)
        with exclude.open("a", encoding="utf-8") as file:
            file.write(f"/{MARKER}\n")
        return {"resolved": _resolved_commit(payload), "submodules": self.init_submodules}

    def _fetch(self, payload: Path) -> str:
        """Fetch the commit alone, or everything if the server does not serve its hash alone; return its name."""
        commit = self.commit
        try:
            _git(payload, "fetch", "--quiet", "--no-tags", "--depth", "1", "--", "origin", commit)
            return "FETCH_HEAD"
        except ToolFailure:
            if not re.fullmatch(r"[0-9a-fA-F]{4,64}", commit):
                raise
        _git(payload, "fetch", "--quiet", "--tags", "--", "origin", "+refs/heads/*:refs/remotes/origin/*")
        try:
            return _git(payload, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
        except ToolFailure as error:
            raise ToolFailure(f"it lacks commit {commit}: {error}") from None


def problem_of_url(url: str) -> str | None:
    """Return why git cannot be given this url. Credentials are rejected: they would show in argv and on disk."""
    shown = redacted(url)
    credential = f"{shown!r} carries a credential; take it out and let git's credential helper or ~/.netrc supply it"
    if re.search(r"[\x00-\x20\x7f]", url) or not url:
        return f"{shown!r} is empty or holds blanks or control characters; write the repository's address"
    if url.startswith("-"):
        return f"{shown!r} begins with '-'; git would take it for an option"
    if re.match(r"[A-Za-z0-9+.-]+::", url):
        return f"{shown!r} names a remote helper, which may run anything; use one of {', '.join(_SCHEMES)}"
    if "://" in url:
        try:
            parts = urlsplit(url)
        except ValueError:
            return f"{shown!r} is not an address"
        if parts.password is not None or (parts.scheme in ("http", "https") and parts.username is not None):
            return credential
        if parts.scheme not in _SCHEMES:
            return f"{shown!r} has the scheme {parts.scheme!r}; use one of {', '.join(_SCHEMES)}"
    elif re.match(r"[^/@]*:[^/@]*@", url):
        return credential
    elif not url.startswith("/") and not _SCP_LIKE.fullmatch(url):
        return f"{shown!r} is neither an address nor a full path; write https://..., git@host:path or /path"
    return f"{shown!r} has a host that begins with '-'" if re.search(r"(?:://|@)-", url) else None


def problem_of_commit(commit: str) -> str | None:
    """Return why git cannot be given this commit, branch or tag."""
    if commit.startswith("-"):
        return f"{commit!r} begins with '-'; git would take it for an option"
    if not commit or _NO_REF.search(commit):
        return f"{commit!r} is not the name of a commit, branch or tag; write one as git shows it"
    return None


def _resolved_commit(clone: Path) -> str:
    return _git(clone, "rev-parse", "HEAD").strip()


def _git(directory: Path, *args: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in _CALLERS_REPOSITORY}
    env["GIT_TERMINAL_PROMPT"] = "0"
    return run_tool("git", *args, env=env, cwd=directory, missing="install git, or check PATH")


# They would redirect packages, or make pip treat the caller's packages as installed
_CALLERS_PYTHON = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"}


@dataclass(frozen=True)
class PythonEnvInstall(Installable):
    """A virtual environment with the package of a repository and further packages in it.

    It is made with the Python that runs mbridge; pip is configured by its own files and variables.
    """

    repo: RepoInstall
    packages: tuple[str, ...] = EXTRA_PACKAGES

    def __str__(self) -> str:
        return f"Python environment of {self.repo.url} at {self.repo.commit}"

    def place(self, install_path: Path) -> Path:
        return venv_path(install_path, self.repo.url, self.repo.commit)

    @property
    def identity(self) -> Facts:
        repo, packages = self.repo, sorted(self.packages)
        return {"kind": "python environment", "url": repo.url, "commit": repo.commit, "packages": packages}

    def problems(self, key: str) -> Iterator[str]:
        return self.repo.problems(key)

    def accepts(self, marker: Facts, path: Path) -> bool:
        """Also look for the interpreter: it is a link, and its target may have been removed."""
        return super().accepts(marker, path) and (path / "bin" / "python").exists()

    def build(self, payload: Path, path: Path) -> Facts:
        """Install the repository's package first and the others after it, as CloudAI does."""
        clone = self.repo.place(path.parent)
        if not self.repo.is_installed(clone):
            raise ToolFailure("its repository is not installed")
        env = {name: value for name, value in os.environ.items() if name not in _CALLERS_PYTHON}
        install = ("-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--")
        python, missing = payload / "bin" / "python", "check the Python that runs mbridge"
        run_tool(sys.executable, "-m", "venv", payload, env=env, missing=missing)
        run_tool(python, *install, clone, env=env, missing=missing)
        if self.packages:
            run_tool(python, *install, *self.packages, env=env, missing=missing)
        # The first lines of the scripts contain the full path of the environment
        before, after = os.fsencode(payload), os.fsencode(path)
        for script in (payload / "bin").iterdir():
            if script.is_file() and not script.is_symlink() and before in (text := script.read_bytes()):
                script.write_bytes(text.replace(before, after))
        return {"resolved": _resolved_commit(clone), "python": sys.version.split()[0]}


_IMAGE = re.compile(
    r"(?:(?P<user>[A-Za-z0-9$._-]+)@)?"
    r"(?:(?P<registry>[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?)#)?"
    r"(?P<image>[a-z0-9][a-z0-9/._-]*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._:-]*))?"
)


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

    def problems(self, key: str) -> Iterator[str]:
        if problem := problem_of_image(self.url):
            yield f"{key}: {problem}"

    def build(self, payload: Path, path: Path) -> Facts:
        """Import, and trust the file rather than the exit code."""
        remedy = "run where enroot is installed, or import the image elsewhere and let container_image name the file"
        run_tool("enroot", "import", "-o", payload, enroot_uri(self.url), env=os.environ, missing=remedy)
        if not payload.is_file():
            raise ToolFailure("enroot succeeded but wrote no image")
        return {}


def problem_of_image(image: str) -> str | None:
    """Return why enroot cannot be given this image."""
    if image.startswith(("/", ".")):
        return f"{image!r}: no such image file; check the path"
    if re.match(r"(?:docker://)?[^/#]*:[^/#]*@", image) and "@sha256:" not in image:
        return "the image's name carries a credential; take it out and put it into enroot's .credentials file"
    if _parse_image(image):
        return None
    return f"{redacted(image)!r} is not an image such as nvcr.io#nvidia/nemo:26.02.00, nor a file"


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
