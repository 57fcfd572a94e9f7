"""Where things lie below a system's `install_path`. Pure naming: `mbridge install` puts them there, scripts find them.

Any URL, commit or image gives a name that is one safe path component.
"""

import re
from pathlib import Path

from cloudai_mbridge.sweep.run_id import slug


def repo_path(install_path: Path, url: str, commit: str) -> Path:
    """Return the clone of a repository at a commit."""
    return install_path / _pinned(url, commit)


def venv_path(install_path: Path, url: str, commit: str) -> Path:
    """Return the Python environment into which a repository at a commit is installed."""
    return install_path / f"{_pinned(url, commit)}-venv"


def image_path(install_path: Path, image: str) -> Path:
    """Return the squashed file of a container image."""
    return install_path / f"{slug(image)}.sqsh"


def _pinned(url: str, commit: str) -> str:
    name = re.split(r"[/:]", url.rstrip("/"))[-1].removesuffix(".git")
    return f"{slug(name)}__{slug(commit)}"
