"""The tests against the real CloudAI, Megatron-Bridge and its launchers: `make interop`.

Upstream's sources are read where they are, as plain trees below one directory: MBRIDGE_UPSTREAM, or one in the user's
cache. None of them is installed. A test whose tree is absent is skipped and says which; where none is there, or another
environment runs, nothing here is imported.
"""

import importlib.util
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

CLOUDAI, BRIDGE_0_3, BRIDGE_0_6 = TREES = ("cloudai", "megatron-bridge-0.3", "megatron-bridge-0.6")
REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("nemo-run", "leptonai", "wandb", "torch", "megatron-core", "rich")
# What CloudAI imports, of which the environment of the other tests lacks some
_IMPORTED = ("bokeh", "kubernetes", "nemo_run", "tbparse", "websockets")
_IMPORTS_CLOUDAI = re.compile(r"^(?:from|import) cloudai\b", re.MULTILINE)
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
UPSTREAM = Path(os.environ.get("MBRIDGE_UPSTREAM") or _CACHE / "cloudai-mbridge/upstream").absolute()

STAND_IN = REPOSITORY / "tests/stand_in/training.py"

Ended = subprocess.CompletedProcess[str]


def find_tree(name: str) -> Path | None:
    """Return a source tree of upstream, None if it is absent."""
    return found if (found := UPSTREAM / name).is_dir() else None


def tree(name: str) -> Path:
    """Return a source tree of upstream, and skip where it is absent."""
    if (found := find_tree(name)) is None:
        pytest.skip(f"{UPSTREAM / name} is absent")
    return found


def why_skipped(module: Path) -> str | None:
    """Return why a module cannot be imported here, None if it can."""
    if absent := [name for name in _IMPORTED if importlib.util.find_spec(name) is None]:
        return f"run `make interop`: {', '.join(absent)} cannot be imported here"
    if not any(map(find_tree, TREES)):
        return f"no source of upstream is in {UPSTREAM}"
    if find_tree(CLOUDAI) is None and _IMPORTS_CLOUDAI.search(module.read_text(encoding="utf-8")):
        return f"{UPSTREAM / CLOUDAI} is absent"
    return None


class Skipped(pytest.Module):
    """A module that is not imported."""

    def collect(self) -> list[pytest.Item]:
        raise pytest.skip.Exception(str(why_skipped(self.path)), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Skipped.from_parent(parent, path=module_path) if why_skipped(module_path) else None


def pytest_configure() -> None:
    """Put CloudAI on the path, here and of every process that a test starts."""
    if (found := find_tree(CLOUDAI)) is not None and why_skipped(Path(__file__)) is None:
        sys.path.insert(0, str(found / "src"))
        os.environ["PYTHONPATH"] = search_path(os.environ.get("PYTHONPATH", ""))


def search_path(*directories: str | Path) -> str:
    """Return a value of PYTHONPATH: these directories, then CloudAI's source."""
    return os.pathsep.join(filter(None, (*map(str, directories), str(UPSTREAM / CLOUDAI / "src"))))


def pytest_report_header() -> list[str]:
    """Say which real things the tests ran against."""
    if reason := why_skipped(Path(__file__)):
        return [f"interop: not run: {reason}"]
    lines = [f"interop: {' '.join(f'{name} {_installed(name)}' for name in PACKAGES)}"]
    lines += [f"interop: {name}: {_described(name)}" for name in TREES]
    return lines


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _described(name: str) -> str:
    """Return what a tree says of itself: its commit, if it has a file with it, and where it is."""
    if (found := find_tree(name)) is None:
        return "absent"
    commit = found / ".commit"
    return f"{commit.read_text().strip()[:12]} in {found}" if commit.is_file() else str(found)


def _copy(name: str, directory: Path) -> Path:
    """Make a git repository with one commit of a source, for this run only: NeMo-Run packs what git knows."""
    shutil.copytree(tree(name), directory, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    identity = ["-c", "user.name=interop", "-c", "user.email=interop@localhost"]
    for command in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "source"]):
        subprocess.run(["git", *command], cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="session")
def cloudai_source() -> Path:
    """CloudAI's source tree: `conf/` and `src/cloudai/` are in it. Read only."""
    return tree(CLOUDAI)


@pytest.fixture(scope="session")
def launcher_0_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of Megatron-Bridge 0.3.0; its launcher is `scripts/performance/setup_experiment.py`."""
    return _copy(BRIDGE_0_3, tmp_path_factory.mktemp("megatron-bridge-0.3") / "Megatron-Bridge")


@pytest.fixture(scope="session")
def launcher_0_6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of Megatron-Bridge 0.6.0."""
    return _copy(BRIDGE_0_6, tmp_path_factory.mktemp("megatron-bridge-0.6") / "Megatron-Bridge")


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
    found = Workplace(tmp_path, {**os.environ, "PYTHONPATH": search_path(REPOSITORY)})
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
