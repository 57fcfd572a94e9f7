"""Make a virtual environment with the package of a cloned repository in it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.git import RepoInstall, resolved_commit
from cloudai_mbridge.install.place import Facts, Installable
from cloudai_mbridge.install.process import run_tool
from cloudai_mbridge.megatron_bridge.pins import venv_path

# Packages that CloudAI's wrapper adds to NeMo-Run. wandb is pinned: the launchers of Megatron-Bridge 0.3 to 0.6 call
# wandb.util.generate_id, which 0.18.7 has and 0.31 does not.
EXTRA_PACKAGES = ("wandb==0.18.7", "numpy==1.26.4")
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

    def accepts(self, marker: Facts, path: Path) -> bool:
        """Also look for the interpreter: it is a link, and its target may have been removed."""
        return super().accepts(marker, path) and (path / "bin" / "python").exists()

    def build(self, payload: Path, path: Path) -> Facts:
        """Install the repository's package first and the others after it, as CloudAI does."""
        clone = self.repo.place(path.parent)
        if not self.repo.is_installed(clone):
            raise ToolFailure("its repository is not installed")
        _run(sys.executable, "-m", "venv", payload)
        _pip_install(payload, clone)
        if self.packages:
            _pip_install(payload, *self.packages)
        _move_scripts(payload, path)
        return {"resolved": resolved_commit(clone), "python": sys.version.split()[0]}


def _pip_install(venv: Path, *what: str | Path) -> None:
    options = ("--quiet", "--no-input", "--disable-pip-version-check")
    _run(venv / "bin" / "python", "-m", "pip", "install", *options, "--", *what)


def _run(*argv: str | Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in _CALLERS_PYTHON}
    run_tool(*argv, env=env, missing="check the Python that runs mbridge")


def _move_scripts(payload: Path, path: Path) -> None:
    """Rewrite the scripts for the environment's final path: their first lines contain its full path."""
    before, after = os.fsencode(payload), os.fsencode(path)
    for script in (payload / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and before in (text := script.read_bytes()):
            script.write_bytes(text.replace(before, after))
