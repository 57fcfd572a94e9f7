"""What the in-process restart is set up with, on a fake package; restarts on gloo where the package is installed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

import torch.distributed as dist

from cloudai_mbridge.training.config.resilience import InProcessRestartConfig
from cloudai_mbridge.training.resilience import inprocess_restart
from cloudai_mbridge.training.resilience.inprocess_restart import maybe_wrap_for_inprocess_restart
from cloudai_mbridge.training.resilience.packages import is_installed

HERE = Path(__file__).parent


class Recorded:
    """Fakes any class or module of the package: it remembers its name and arguments."""

    def __init__(self, name: str = "", *args: Any, **kwargs: Any) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Recorded(name, *args, **kwargs)


class FakeCallWrapper:
    """Fakes the package's CallWrapper in its attempt 4."""

    iteration = 4


class FakePackage:
    """Fakes nvidia_resiliency_ext.inprocess; its Wrapper calls the function once."""

    CallWrapper = FakeCallWrapper
    Compose = staticmethod(lambda *parts: Recorded("Compose", *parts))
    initialize = abort = nested_restarter = health_check = Recorded()
    finalize = SimpleNamespace(Finalize=object, ThreadedFinalize=Recorded().ThreadedFinalize)
    rank_assignment = SimpleNamespace(
        Tree=Recorded().Tree, Layer=Recorded().Layer, LayerFlag=SimpleNamespace(RESERVE="reserve")
    )

    def __init__(self) -> None:
        self.kwargs: dict[str, Any] = {}

    def Wrapper(self, **kwargs: Any) -> Any:  # noqa: N802
        self.kwargs = kwargs

        def wrapped(fn: Any) -> Any:
            (name,) = (name for name, kind in fn.__annotations__.items() if kind is FakeCallWrapper)
            return lambda *args, **kwargs: fn(*args, **kwargs, **{name: FakeCallWrapper()})

        return wrapped


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage()
    monkeypatch.setattr(inprocess_restart, "nvrx", lambda part: fake)
    monkeypatch.setattr(inprocess_restart, "_outer_store", lambda: dist.HashStore())
    monkeypatch.setenv("MASTER_PORT", "29000")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "error")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    return fake


def config(backend: str = "gloo", **settings: Any) -> Any:
    restart = InProcessRestartConfig(enabled=True, **settings)
    return SimpleNamespace(inprocess_restart=restart, dist=SimpleNamespace(distributed_backend=backend))


STATE: Any = SimpleNamespace(reset_for_restart=lambda: None)


def parts(composed: Any) -> dict[str, Any]:
    return {part.name: part.kwargs for part in composed.args}


@pytest.mark.parametrize("section", [None, InProcessRestartConfig()])
def test_off(section: Any) -> None:
    assert maybe_wrap_for_inprocess_restart(len, config=SimpleNamespace(inprocess_restart=section), state=STATE) == (  # type: ignore[arg-type]
        len,
        None,
    )


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group", "package")
def test_too_late(sentence: Sentence) -> None:
    with pytest.raises(RuntimeError) as caught:
        maybe_wrap_for_inprocess_restart(len, config(), STATE)
    sentence(caught)


def test_every_setting_is_handed_on(package: FakePackage) -> None:
    durations = {name: 100.0 + index for index, name in enumerate(inprocess_restart._DURATIONS)}
    maybe_wrap_for_inprocess_restart(
        len, config(**durations, max_iterations=9, active_world_size=12, max_rank_faults=2), STATE
    )
    given = package.kwargs
    assert {name: given[name] for name in durations} == {
        name: timedelta(seconds=value) for name, value in durations.items()
    }
    retry = parts(given["initialize"])["RetryController"]
    assert retry == {"max_iterations": 9, "min_world_size": 12}
    assert given["store_kwargs"] == {"timeout": timedelta(seconds=300), "port": 29002}
    world, node = given["rank_assignment"].kwargs["layers"]
    assert world.kwargs == {"min_ranks": 12, "max_ranks": 12, "flag": "reserve"}
    assert (node.kwargs["min_ranks"], node.kwargs["max_ranks"]) == (8, 8)
    assert node.kwargs["key_or_fn"](None) == os.uname().nodename
    assert parts(given["health_check"]) == {
        "CudaHealthCheck": {"timeout": timedelta(seconds=10)},
        "FaultCounter": {"max_rank_faults": 2},
    }


def test_every_field_has_a_use() -> None:
    elsewhere = {
        "enabled",
        "max_iterations",
        "granularity",
        "active_world_size",
        "empty_cuda_cache",
        "max_rank_faults",
        "monitor_process_logdir",
    }
    assert {*inprocess_restart._DURATIONS} | elsewhere == {*vars(InProcessRestartConfig())}


def test_defaults(package: FakePackage) -> None:
    maybe_wrap_for_inprocess_restart(len, config(granularity="rank"), STATE)
    (world,) = package.kwargs["rank_assignment"].kwargs["layers"]
    assert world.kwargs["min_ranks"] == 16
    assert package.kwargs["health_check"].name == "CudaHealthCheck"
    assert package.kwargs["monitor_process_logfile"] is None


@pytest.mark.parametrize("empty_cuda_cache", [True, False])
def test_finalisers_on_a_gpu(package: FakePackage, empty_cuda_cache: bool) -> None:
    maybe_wrap_for_inprocess_restart(len, config("nccl", granularity="rank", empty_cuda_cache=empty_cuda_cache), STATE)
    finalisers = package.kwargs["finalize"].args
    assert [part.kwargs["fn"].__name__ for part in finalisers] == ["reset_for_restart", "empty_cache"][
        : 1 + empty_cuda_cache
    ]
    assert {part.kwargs["timeout"] for part in finalisers} == {timedelta(seconds=10)}


def test_the_state_is_reset_on_a_cpu(package: FakePackage) -> None:
    resets: list[None] = []
    state: Any = SimpleNamespace(reset_for_restart=lambda: resets.append(None))
    maybe_wrap_for_inprocess_restart(len, config(), state)
    assert package.kwargs["finalize"]("restart state") == "restart state"
    assert resets == [None]


@pytest.mark.usefixtures("package")
def test_each_attempt_has_a_store_of_its_own() -> None:
    def body(number: int, store: Any, factor: int) -> int:
        store.set("key", "value")
        return number * factor

    restarted, store = maybe_wrap_for_inprocess_restart(body, config(), STATE)
    assert restarted(6, factor=7, store=store) == 42
    assert isinstance(store, dist.HashStore)
    assert store.get("4/key") == b"value"


def test_log_of_the_monitor(package: FakePackage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    for rank, name in (("0", f"monitor_77_{os.uname().nodename}_0_0.log"), ("1", None)):
        monkeypatch.setenv("SLURM_PROCID", rank)
        maybe_wrap_for_inprocess_restart(len, config(monitor_process_logdir=str(tmp_path)), STATE)
        assert package.kwargs["monitor_process_logfile"] == (name and str(tmp_path / name))


@pytest.mark.usefixtures("package")
def test_a_noisy_log_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "info")
    with pytest.warns(UserWarning, match="TORCH_CPP_LOG_LEVEL=error"):
        maybe_wrap_for_inprocess_restart(len, config(), STATE)


def restarting(failures: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "error"}
    script = [str(HERE / "inprocess_run.py"), str(failures)]
    return subprocess.run([*command, *script], env=env, capture_output=True, text=True, timeout=1500, check=False)


needs_package = pytest.mark.skipif(not is_installed("nvidia_resiliency_ext"), reason="needs nvidia-resiliency-ext")


@pytest.mark.process
@needs_package
@pytest.mark.drill
def test_the_real_package_restarts_a_failed_training() -> None:
    done = restarting(failures=1)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"attempt 2 of rank {rank} done, 1 resets, okok" in done.stdout
    assert done.stdout.count("refused after initialization") == 2


@pytest.mark.process
@needs_package
@pytest.mark.drill
def test_the_real_package_gives_up_after_the_configured_attempts() -> None:
    done = restarting(failures=9)
    assert done.returncode != 0
    assert "simulated failure 3" in done.stderr
    assert "simulated failure 4" not in done.stderr
    assert "RestartAbort" in done.stderr
