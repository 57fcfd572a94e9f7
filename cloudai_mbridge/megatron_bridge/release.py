"""The Megatron-Bridge that a test pins: its release, and its path below the install_path.

The pinned commit is a tag (`v0.3.0`), a release branch (`r0.3.0`), or the commit of a release. For any other commit the
version is read from `package_info.py` of an installed clone, and the presets are unknown.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.text import slug
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import GitRepo, TestDefinition


def version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version such as 0.3.0, to compare."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Release:
    """A release, and how it was found.

    version: such as 0.3.0.
    source: in a few words, for reports.
    clone: the installed repository, if it is there.
    is_known: the commit is that of a release; else `version` is from the package_info.py of a clone.
    """

    version: str
    source: str
    clone: Path | None = None
    is_known: bool = True

    @property
    def key(self) -> tuple[int, ...]:
        """The version's numbers, to compare."""
        return version_key(self.version)

    @property
    def core(self) -> str | None:
        """Its release of Megatron-Core, such as 0.18; the minor version's for an unknown patch."""
        minor = ".".join(self.version.split(".")[:2])
        alike = [known for known in known_releases() if known["version"].startswith(f"{minor}.")]
        exact = [known for known in alike if known["version"] == self.version]
        found = (exact or alike or [{"core": ""}])[-1]["core"]
        return ".".join(found.split(".")[:2]) or None


def find_release(commit: str, clone: Path | None = None) -> Release | None:
    """Return the release of a pinned commit, or None if unknown.

    clone: path of the repository's clone at that commit, if installed.
    """
    tagged = _tagged(commit)
    branch = re.fullmatch(r"r(\d+\.\d+)(\.\d+)?", commit)
    versions = [str(known["version"]) for known in known_releases()]
    newest_of_branch = next((one for one in reversed(versions) if branch and one.startswith(f"{branch[1]}.")), None)
    released = tagged or newest_of_branch
    installed = _version_of(clone) if clone is not None else None
    if clone is not None and installed:
        return Release(tagged or installed, f"the installed {clone.name}", clone, released is not None)
    if released is None:
        return None
    return Release(released, f"{'commit' if tagged else 'branch'} {commit}")


def _tagged(commit: str) -> str | None:
    """Return the release tagged at a commit; its package_info.py may differ: v0.6.0 has 0.6.1."""
    for known in known_releases():
        if commit.removeprefix("v") == known["version"] or (len(commit) >= 7 and known["commit"].startswith(commit)):
            return str(known["version"])
    return None


@cache
def known_releases() -> tuple[dict[str, Any], ...]:
    """Return the releases that the shipped data describe, oldest first."""
    text = (files("cloudai_mbridge.megatron_bridge") / "data" / "releases.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["release"])


def _version_of(clone: Path) -> str | None:
    """Read MAJOR, MINOR and PATCH of a clone's package_info.py, without running it."""
    try:
        text = (clone / "src/megatron/bridge/package_info.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parts = [re.search(rf"^{name}\s*=\s*(\d+)\s*$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None


MOUNT = "/opt/Megatron-Bridge"
URL = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"


def install_root(system: System) -> Path:
    """Return the absolute install_path of a system."""
    return Path(system.install_path or "").expanduser().absolute()


def megatron_bridge_of(definition: TestDefinition) -> GitRepo | None:
    """Return the first repository that is Megatron-Bridge's by its URL or its mount."""
    for repo in definition.git_repos:
        if "Megatron-Bridge" in repo.url or (repo.mount_as or "").rstrip("/") == MOUNT:
            return repo
    return None


def pin_of(version: str) -> dict[str, Any]:
    """Return the entry of [[git_repos]] that pins a release."""
    return {"url": URL, "commit": f"v{version}", "mount_as": MOUNT, "init_submodules": True}


def repo_path(install_path: Path, url: str, commit: str) -> Path:
    """Return the path of a repository's clone at a commit: one safe path component, whatever the URL."""
    name = re.split(r"[/:]", url.rstrip("/"))[-1].removesuffix(".git")
    return install_path / f"{slug(name)}__{slug(commit)}"


def venv_path(install_path: Path, url: str, commit: str) -> Path:
    """Return the Python environment into which a repository at a commit is installed."""
    return install_path / f"{repo_path(install_path, url, commit).name}-venv"


def image_path(install_path: Path, image: str) -> Path:
    """Return the squashed file of a container image."""
    return install_path / f"{slug(image)}.sqsh"
