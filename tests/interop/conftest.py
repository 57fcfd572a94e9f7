"""The tests against the real CloudAI and the real launcher of Megatron-Bridge: `make interop`.

Three variables name the unpacked sources; without them everything here is skipped, and nothing of upstream is imported.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from cloudai_mbridge.integrations.cloudai import TEMPLATE
from tests.sandbox import SlurmSandbox

CLOUDAI, LAUNCHER_0_3, LAUNCHER_0_6 = VARIABLES = (
    "MBRIDGE_CLOUDAI_SOURCE",
    "MBRIDGE_LAUNCHER_SOURCE_0_3",
    "MBRIDGE_LAUNCHER_SOURCE_0_6",
)
REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("cloudai", "nemo-run", "leptonai", "wandb", "torch", "megatron-core", "rich")

STAND_IN = REPOSITORY / "tests/stand_in/training.py"

Ended = subprocess.CompletedProcess[str]


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
def launch(tmp_path: Path) -> Callable[..., Ended]:
    """Run a launcher in its dry run: launch(launcher_0_3, "-m", "llama", ...)."""

    def run(repository: Path, *args: str, env: Mapping[str, str] | None = None) -> Ended:
        return subprocess.run(
            [sys.executable, "setup_experiment.py", "--dryrun", *args],
            cwd=repository / "scripts/performance",
            env={**os.environ, "NEMORUN_HOME": str(tmp_path / "nemo-run"), **(env or {})},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )

    return run


_ON_SLURM = """name = "sandbox"
scheduler = "slurm"
install_path = "install"
output_path = "results"
default_partition = "main"
gpus_per_node = 4
mpi = "none"
monitor_interval = 1

[[partitions]]
name = "main"
"""
_STANDALONE = 'name = "here"\nscheduler = "standalone"\ninstall_path = "install"\noutput_path = "results"\n'
_TEST = """name = "tiny"
description = "a tiny GPT"
test_template_name = "{template}"
{head}
[metrics]
warmup_steps = 1

[cmd_args]
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 4
{args}

[extra_env_vars]
{env}
"""
_SCENARIO = (
    'name = "scenario"\n{head}\n[[Tests]]\nid = "points"\ntest_name = "tiny"\ntime_limit = "00:10:00"\n{tests}\n'
)


@dataclass
class Workplace:
    """A directory with CloudAI's files, in which CloudAI runs with our workload."""

    directory: Path
    env: dict[str, str]

    def write(self, args: str = "", env: str = "", head: str = "", template: str = TEMPLATE) -> None:
        """Write the test, with these lines of cmd_args, extra_env_vars and the test itself."""
        text = _TEST.format(args=args, env=env, head=head, template=template)
        (self.directory / "tests/tiny.toml").write_text(text)

    def write_scenario(self, tests: str = "", head: str = "") -> None:
        (self.directory / "scenario.toml").write_text(_SCENARIO.format(tests=tests, head=head))

    def run(self, *command: str, system: str = "slurm", env: Mapping[str, str] | None = None) -> Ended:
        """Run one of CloudAI's commands on the files here."""
        files = ["--system-config", f"{system}.toml", "--tests-dir", "tests", "--test-scenario", "scenario.toml"]
        return self.call(*command, *files, env=env)

    def call(self, *arguments: str, env: Mapping[str, str] | None = None) -> Ended:
        return subprocess.run(
            [sys.executable, "-m", "cloudai_mbridge.integrations.cloudai", *arguments],
            cwd=self.directory,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )

    @property
    def results(self) -> Path:
        """The directory of the only run."""
        (found,) = (path for path in (self.directory / "results").iterdir() if path.is_dir())
        return found


@pytest.fixture(scope="session")
def accounting_cluster() -> Iterator[SlurmSandbox]:
    """A cluster on which sacct works: CloudAI asks nothing else.

    A job's number decides its port. Other clusters of this machine count from 1; CloudAI does not repeat a point.
    """
    directory = tempfile.mkdtemp(dir="/tmp", prefix="mb-")
    first = f"FirstJobId={1000 + os.getpid() % 12000}"
    with SlurmSandbox(directory, nodes=2, gpus=4, accounting=True, extra_conf=first, die_with_parent=True) as sandbox:
        yield sandbox
    sandbox.stop(purge=True)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """Files of one test on a Slurm system (slurm.toml) and on this machine (standalone.toml), and no cluster."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "slurm.toml").write_text(_ON_SLURM)
    (tmp_path / "standalone.toml").write_text(_STANDALONE)
    found = Workplace(tmp_path, {**os.environ, "PYTHONPATH": str(REPOSITORY)})
    found.write()
    found.write_scenario()
    return found


@pytest.fixture
def cluster_place(place: Workplace, accounting_cluster: SlurmSandbox, cloudai_source: Path) -> Workplace:
    """The same on a cluster; the trainer is a stand-in, told by the variable STAND_IN what to do.

    CloudAI installs nothing where srun has no --container-image; its script for nodes' descriptions is put in place.
    """
    (place.directory / "install").mkdir()
    script = cloudai_source / "src/cloudai/systems/slurm/slurm-metadata.sh"
    shutil.copy(script, place.directory / "install")
    place.env = {**place.env, **accounting_cluster.env, "MBRIDGE_PYTHON": str(STAND_IN)}
    return place
