"""Shared by all tests: the Slurm gate, the command line as a process, a sandbox cluster."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import changed, figures, golden, workers
from tests.figures import figure as figure
from tests.forked import STARTS, run_mbridge
from tests.golden import golden_file as golden_file
from tests.golden import sentence as sentence
from tests.sandbox import SlurmSandbox, missing_programs
from tests.sandbox.conf import PATIENT

REPOSITORY = Path(__file__).parents[1]
# Before torch is loaded, here and in all processes of tests: its idle threads sleep, as there are more than cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# `python3` may be a script of pyenv, which takes longer than the stand-in for the training (tests/stand_in/training.py)
os.environ.setdefault("STAND_IN_PYTHON", os.path.realpath(sys.executable))

# A time limit for each example fails on a busy machine
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

Mbridge = Callable[..., "subprocess.CompletedProcess[str]"]


_WITH_PROCESSES = {"e2e", "gpu_check", "interop", "sandbox", "slurm"}  # folders of which every test may start some
_STARTING = {"mbridge", "cluster", "ranks", "train"}  # fixtures that start them
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", STARTS}
_running: list[pytest.Item] = []


@pytest.fixture(autouse=True)
def _no_attention_backend_is_left() -> Iterator[None]:
    """Drop the variables in which Megatron-Core keeps a model's attention backend: the next one may have another."""
    yield
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-processes", action="store_true", help="fail tests that start one without the marker for it")
    workers.pytest_addoption(parser)
    changed.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    figures.pytest_configure(config)
    golden.pytest_configure(config)
    workers.pytest_configure(config)
    changed.pytest_configure(config)
    if config.getoption("--no-processes"):
        sys.addaudithook(_forbid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Let fixtures end processes with others: after the last test, the session's, which it need not have used."""
    item = _running.pop()
    try:
        return (yield)
    finally:
        _running.append(item)


def _forbid(event: str, _: object) -> None:
    """Fail a test that starts a process and lacks the marker; an audit hook sees every start."""
    if event in _STARTS and _running and not any(map(_running[-1].get_closest_marker, ("process", "long", "drill"))):
        pytest.fail(f"{event} without the marker `process`: `make check` runs tests that start none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip Slurm tests where Slurm is not installed; fail them where it was said to be required."""
    items[:] = _mixed(items)
    for item in items:
        if _WITH_PROCESSES.intersection(item.path.parts) or _STARTING.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.process)
    if not (missing := missing_programs()):
        return
    for item in items:
        if item.get_closest_marker("slurm"):
            if os.environ.get("MBRIDGE_REQUIRE_SLURM"):
                raise pytest.UsageError(f"Slurm is required and not installed: {', '.join(missing)}")
            item.add_marker(pytest.mark.skip(reason=f"SLURM IS NOT INSTALLED ({', '.join(missing)})"))


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put files that mostly wait, for Slurm and processes, between those that compute, so that they run together.

    The GPU check comes first, then training on real ranks: their long tests would otherwise run at the end, beside
    idle workers.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if "e2e" in path.parts]
    others = sorted(
        (path for path in files if "e2e" not in path.parts),
        key=lambda path: ("gpu_check" not in path.parts, "training" not in path.parts),
    )
    places = {path: (place + 0.5) / len(paths) for paths in (waiting, others) for place, path in enumerate(paths)}
    return [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


@pytest.fixture(scope="session", autouse=True)
def no_runs_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the index of the user's own runs out of the tests, and theirs out of it; processes inherit this."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ.pop("MBRIDGE_RESULTS", None)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def mbridge() -> Mbridge:
    """Run the command line as a user does: mbridge("run", "--system-config", path, ...)."""

    return functools.partial(run_mbridge, cwd=REPOSITORY)


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmSandbox]:
    """A Slurm cluster of two nodes with four GPUs each. Its directory is short: it holds unix sockets."""
    directory = tempfile.mkdtemp(dir="/tmp", prefix="mb-")
    with SlurmSandbox(directory, nodes=2, gpus=4, extra_conf=PATIENT, die_with_parent=True) as sandbox:
        yield sandbox
    sandbox.stop(purge=True)
