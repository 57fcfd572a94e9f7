"""Where things lie below a system's `install_path`. Pure naming: `mbridge install` puts them there, scripts find them.

Any URL, commit or image gives a name that is one safe path component.
"""

from pathlib import Path

from cloudai_mbridge.sweep.pinned import clone_path, pinned_name
from cloudai_mbridge.sweep.run_id import slug


def repo_path(install_path: Path, url: str, commit: str) -> Path:
    """Return the clone of a repository at a commit."""
    return clone_path(install_path, url, commit)


def venv_path(install_path: Path, url: str, commit: str) -> Path:
    """Return the Python environment into which a repository at a commit is installed."""
    return install_path / f"{pinned_name(url, commit)}-venv"


def image_path(install_path: Path, image: str) -> Path:
    """Return the squashed file of a container image."""
    return install_path / f"{slug(image)}.sqsh"
