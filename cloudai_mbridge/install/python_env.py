"""Make a virtual environment with the package of a cloned repository in it."""

import os
import sys
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.git import RepoInstaller, resolved_commit
from cloudai_mbridge.install.installables import PythonEnvInstall
from cloudai_mbridge.install.place import Facts, Installer
from cloudai_mbridge.install.process import run_tool

# They would put packages elsewhere, or let pip take the caller's for installed ones
_CALLERS_PYTHON = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"}


class PythonEnvInstaller(Installer):
    """Makes the environment with the Python that runs mbridge; pip is configured by its own files and variables."""

    def __init__(self, item: PythonEnvInstall, clone: Path) -> None:
        self._item, self._clone = item, clone

    @property
    def identity(self) -> Facts:
        repo = self._item.repo
        return {
            "kind": "python environment",
            "url": repo.url,
            "commit": repo.commit,
            "packages": sorted(self._item.packages),
        }

    def accepts(self, marker: Facts, path: Path) -> bool:
        """Also look for the interpreter: it is a link, and its target may have been removed."""
        return super().accepts(marker, path) and (path / "bin" / "python").exists()

    def build(self, payload: Path, path: Path) -> Facts:
        """Install the repository's package first and the others after it, as CloudAI does."""
        if not RepoInstaller(self._item.repo).is_installed(self._clone):
            raise ToolFailure("its repository is not installed")
        _run(sys.executable, "-m", "venv", payload)
        _pip_install(payload, self._clone)
        if self._item.packages:
            _pip_install(payload, *self._item.packages)
        _move_scripts(payload, path)
        return {"resolved": resolved_commit(self._clone), "python": sys.version.split()[0]}


def _pip_install(venv: Path, *what: str | Path) -> None:
    options = ("--quiet", "--no-input", "--disable-pip-version-check")
    _run(venv / "bin" / "python", "-m", "pip", "install", *options, "--", *what)


def _run(*argv: str | Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in _CALLERS_PYTHON}
    run_tool(*argv, env=env, missing="check the Python that runs mbridge")


def _move_scripts(payload: Path, path: Path) -> None:
    """Make the scripts name the place where the environment will be: their first lines hold its full path."""
    before, after = os.fsencode(payload), os.fsencode(path)
    for script in (payload / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and before in (text := script.read_bytes()):
            script.write_bytes(text.replace(before, after))
