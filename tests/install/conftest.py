"""Real git repositories and packages to install from, and a fake enroot; nothing here needs a network."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.models.test_definition import TestDefinition

# A build backend inside the package, so that pip has nothing to download
BACKEND = """\
import zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = "{name}-1.0-py3-none-any.whl"
    files = {{
        "{name}.py": "def main():\\n    print('this is {name}')\\n",
        "{name}-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n",
        "{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        "{name}-1.0.dist-info/entry_points.txt": "[console_scripts]\\n{name} = {name}:main\\n",
    }}
    with zipfile.ZipFile(wheel_directory + "/" + name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr("{name}-1.0.dist-info/RECORD", "".join(path + ",,\\n" for path in files))
    return name
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'

FAKE_ENROOT = """\
#!{python}
# A fake: writes what it was asked to the log, and a file in place of the image
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if os.path.exists({log!r} + ".fail"):
    sys.exit("[INFO] Fetching image manifest\\n[ERROR] Could not process JSON input: 401 Unauthorized")
with open(sys.argv[sys.argv.index("-o") + 1], "wb") as image:
    image.write(b"hsqs")
"""


def git(directory: Path, *args: str) -> str:
    """Run git as the author of the test's repositories."""
    who = {f"GIT_{role}_{key}": "t@example.org" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    return subprocess.run(
        ["git", *args], cwd=directory, env={**os.environ, **who}, check=True, capture_output=True, text=True
    ).stdout.strip()


def write_package(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pyproject.toml").write_text(PYPROJECT)
    (directory / "backend.py").write_text(BACKEND.format(name=name))
    return directory


def write_executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Repo:
    """A git repository with three commits: tag v1, an untagged one, and the head of main."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.url = directory, f"file://{directory}"
        write_package(directory, "stand_in")
        git(directory, "init", "--quiet", "--initial-branch", "main")
        self.commits = [self.commit(text) for text in ("one", "two", "three")]
        git(directory, "tag", "-a", "-m", "one", "v1", self.commits[0])

    def commit(self, text: str) -> str:
        (self.directory / "file.txt").write_text(text)
        git(self.directory, "add", ".")
        git(self.directory, "commit", "--quiet", "-m", text)
        return git(self.directory, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def _offline_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let git and pip see neither the user's settings nor a network; let git clone submodules from directories."""
    settings = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "protocol.file.allow",
        "GIT_CONFIG_VALUE_0": "always",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "MBRIDGE_NEMO_RUN_PACKAGES": "",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def make_repo(tmp_path: Path) -> Callable[[str], Repo]:
    return lambda name: Repo(tmp_path / "origins" / name)


@pytest.fixture
def repo(make_repo: Callable[[str], Repo]) -> Repo:
    return make_repo("Stand-In")


@pytest.fixture
def make_package(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: write_package(tmp_path / "packages" / name, name)


@pytest.fixture
def fake_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put an executable of this name and text at the front of PATH."""
    directory = tmp_path / "fakes"
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return lambda name, text: write_executable(directory / name, text)


@pytest.fixture
def enroot_calls(tmp_path: Path, fake_command: Callable[[str, str], Path]) -> Callable[[], list[list[str]]]:
    """Put a fake enroot on PATH and return what reads the arguments of its calls."""
    log = tmp_path / "enroot.log"
    fake_command("enroot", FAKE_ENROOT.format(python=sys.executable, log=str(log)))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def make_test() -> Callable[..., TestDefinition]:
    """Build a test of the upstream launcher that needs these repositories, as a TOML would."""

    def make(nemo_run: Repo, *repos: Any, image: str = "", name: str = "t") -> TestDefinition:
        args = {"model_family_name": "f", "model_recipe_name": "r", "hf_token": "t0ken-in-a-toml"}
        data = {
            "name": name,
            "description": "d",
            "cmd_args": {**args, "container_image": image},
            "nemo_run_repo": {"url": nemo_run.url, "commit": "main"},
            "git_repos": [*repos],
        }
        return TestDefinition.model_validate(data)

    return make
