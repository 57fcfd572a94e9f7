"""The Megatron-Bridge that a test pins, and its path below the install_path. Pure naming."""

import re
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.text import slug
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import GitRepo, TestDefinition

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
