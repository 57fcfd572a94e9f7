"""The tests against the real CloudAI and the real launcher of Megatron-Bridge: `make interop`.

Three variables name the unpacked sources; without them everything here is skipped, and nothing of upstream is imported.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

CLOUDAI, LAUNCHER_0_3, LAUNCHER_0_6 = VARIABLES = (
    "MBRIDGE_CLOUDAI_SOURCE",
    "MBRIDGE_LAUNCHER_SOURCE_0_3",
    "MBRIDGE_LAUNCHER_SOURCE_0_6",
)
REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("cloudai", "nemo-run", "leptonai", "wandb", "torch", "megatron-core", "rich")

CloudAI = Callable[..., "subprocess.CompletedProcess[str]"]


def source(variable: str) -> Path | None:
    """Return the directory that a variable names."""
    value = os.environ.get(variable)
    return Path(value).resolve() if value and Path(value).is_dir() else None


def missing() -> list[str]:
    return [variable for variable in VARIABLES if source(variable) is None]


class Skipped(pytest.Module):
    """A module that is not imported."""

    def collect(self) -> list[pytest.Item]:
        reason = f"run `make interop`: {', '.join(missing())} must name unpacked sources"
        raise pytest.skip.Exception(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if missing() else None


def pytest_report_header() -> list[str]:
    """Say which real things the tests ran against."""
    if missing():
        return [f"interop: not run, without {', '.join(missing())}"]
    lines = [f"interop: {' '.join(f'{name} {_installed(name)}' for name in PACKAGES)}"]
    lines += [f"interop: {_named(variable)}" for variable in VARIABLES]
    return lines


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _named(variable: str) -> str:
    """Return a source with its own version and where it was taken from."""
    directory = source(variable)
    assert directory
    origin = directory / ".source"
    taken_from = Path(origin.read_text().strip()).name if origin.exists() else str(directory)
    numbers = directory / "src/megatron/bridge/package_info.py"
    if not numbers.exists():
        return f"CloudAI from {taken_from}"
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", numbers.read_text(), flags=re.MULTILINE))
    return f"Megatron-Bridge {found['MAJOR']}.{found['MINOR']}.{found['PATCH']} from {taken_from}"


def _copy(variable: str, directory: Path) -> Path:
    """Copy a source and make it a git repository with one commit: NeMo-Run packs what git knows."""
    found = source(variable)
    assert found
    shutil.copytree(found, directory, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    identity = ["-c", "user.name=interop", "-c", "user.email=interop@localhost"]
    for command in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "source"]):
        subprocess.run(["git", *command], cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="session")
def cloudai_source() -> Path:
    """CloudAI's source tree: `conf/` and `src/cloudai/` are in it. Read only."""
    found = source(CLOUDAI)
    assert found
    return found


@pytest.fixture(scope="session")
def launcher_0_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of Megatron-Bridge 0.3.0; its launcher is `scripts/performance/setup_experiment.py`."""
    return _copy(LAUNCHER_0_3, tmp_path_factory.mktemp("megatron-bridge-0.3") / "Megatron-Bridge")


@pytest.fixture(scope="session")
def launcher_0_6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of Megatron-Bridge 0.6.0."""
    return _copy(LAUNCHER_0_6, tmp_path_factory.mktemp("megatron-bridge-0.6") / "Megatron-Bridge")


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run a launcher in its dry run: launch(launcher_0_3, "-m", "llama", ...)."""

    def run(repository: Path, *args: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "setup_experiment.py", "--dryrun", *args],
            cwd=repository / "scripts/performance",
            env={**os.environ, "NEMORUN_HOME": str(tmp_path / "nemo-run"), **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
