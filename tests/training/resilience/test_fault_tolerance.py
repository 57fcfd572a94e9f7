"""The order of calls to the rank monitor, on a fake client; the real one where the package is installed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

import torch.distributed as dist

from cloudai_mbridge.training.config.resilience import FaultToleranceConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.resilience import fault_tolerance as ft
from cloudai_mbridge.training.resilience.packages import is_installed
from cloudai_mbridge.training.state import FaultToleranceState

HERE = Path(__file__).parent


class FakeClient:
    """Fakes the package's RankMonitorClient: it remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.refuses = False

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(("load", state))

    def init_workload_monitoring(self) -> None:
        if self.refuses:
            raise OSError("no socket")
        self.calls.append("init")

    def start_section(self, section: str) -> None:
        self.calls.append(f"+{section}")

    def end_section(self, section: str) -> None:
        self.calls.append(f"-{section}")

    def calculate_and_set_section_timeouts(self, selected_sections: list[str], calc_out_of_section: bool) -> None:
        self.calls.append((selected_sections, calc_out_of_section))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": sum(isinstance(call, tuple) for call in self.calls)}

    def shutdown_workload_monitoring(self) -> None:
        self.calls.append("shutdown")

    def taken(self) -> list[Any]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(ft, "nvrx", lambda part: SimpleNamespace(RankMonitorClient=lambda: fake))
    return fake


def started(save: Path | None, async_save: bool = False, calculate: bool = True) -> Any:
    config = FaultToleranceConfig(enable_ft_package=True, calc_ft_timeouts=calculate)
    checkpoint = SimpleNamespace(save=save and str(save), async_save=async_save)
    state: Any = SimpleNamespace(rank_monitor_client=None, fault_tolerance_state=FaultToleranceState())
    ft.setup(SimpleNamespace(ft=config, checkpoint=checkpoint), state)  # type: ignore[arg-type]
    return state


def train(state: Any, steps: int) -> None:
    for _ in range(steps):
        ft.on_training_step_start(state)
        ft.on_training_step_end(state)


def evaluate(state: Any, steps: int) -> None:
    for _ in range(steps):
        ft.on_eval_step_start(state)
        ft.on_eval_step_end(state)


def save(state: Any, is_async_finalization: bool = False) -> None:
    ft.on_checkpointing_start(state)
    ft.on_checkpointing_end(is_async_finalization, state)


STEP, SAVE = ["+step", "-step"], ["+checkpointing", "-checkpointing"]


@pytest.mark.usefixtures("group")
def test_sections_of_a_run(client: FakeClient, tmp_path: Path) -> None:
    state = started(tmp_path)
    assert client.taken() == ["init", "+setup"]
    ft.on_checkpoint_loaded(False, state)
    train(state, 2)
    assert client.taken() == ["-setup", *STEP]  # the first step warms up
    evaluate(state, 3)
    assert client.taken() == [*STEP, *STEP]  # so does the first of an evaluation
    save(state, is_async_finalization=True)
    assert client.taken() == SAVE
    save(state)
    assert client.taken() == [*SAVE, (["setup", "checkpointing"], False)]
    train(state, 14)
    evaluate(state, 2)
    assert client.taken() == STEP * 15
    save(state)
    assert client.taken() == [*SAVE, (["setup", "step", "checkpointing"], False)]
    ft.shutdown(state)
    assert client.taken() == [(["setup", "step", "checkpointing"], True), "shutdown"]
    ft.shutdown(state)
    assert client.taken() == []


@pytest.mark.usefixtures("group")
def test_state_is_kept_and_taken_by_the_next_run(client: FakeClient, tmp_path: Path) -> None:
    state = started(tmp_path)
    save(state)
    assert json.loads((tmp_path / "ft_state.json").read_text()) == {"updates": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["ft_state.json"]
    client.taken()
    started(tmp_path)
    assert client.taken() == [("load", {"updates": 1}), "init", "+setup"]
    (tmp_path / "ft_state.json").write_text('{"updates": ')
    started(tmp_path)
    assert client.taken() == [("load", {}), "init", "+setup"]


@pytest.mark.usefixtures("group")
def test_what_was_not_seen_is_not_learned(client: FakeClient, tmp_path: Path) -> None:
    state = started(tmp_path, async_save=True)
    ft.on_checkpoint_loaded(True, state)  # from local memory
    train(state, 15)
    client.taken()
    save(state)
    assert client.taken() == SAVE  # an asynchronous save says nothing of its duration
    train(state, 1)
    ft.shutdown(state)
    assert client.taken() == [*STEP, (["step"], False), "shutdown"]
    state = started(tmp_path / "other", calculate=False)
    train(state, 20)
    client.taken()
    save(state)
    ft.shutdown(state)
    assert client.taken() == [*SAVE, "shutdown"]
    assert not (tmp_path / "other").exists()


def test_a_run_that_only_evaluates_closes_setup(client: FakeClient, tmp_path: Path) -> None:
    state = started(tmp_path, calculate=False)
    evaluate(state, 2)
    assert client.taken() == ["init", "+setup", "-setup", *STEP]
    ft.shutdown(started(tmp_path, calculate=False))
    assert client.taken() == ["init", "+setup", "-setup", "shutdown"]


def test_refusals(client: FakeClient, tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(ConfigError, match=r"set checkpoint\.save"):
        started(None)
    client.refuses = True
    with pytest.raises(ConfigError) as caught:
        started(tmp_path)
    sentence(caught)


@pytest.mark.parametrize("section", [None, FaultToleranceConfig()])
def test_nothing_happens_without_the_package(section: Any) -> None:
    state: Any = SimpleNamespace(rank_monitor_client=None, fault_tolerance_state=FaultToleranceState())
    ft.setup(SimpleNamespace(ft=section), state)  # type: ignore[arg-type]
    train(state, 3)
    evaluate(state, 3)
    save(state)
    ft.on_checkpoint_loaded(False, state)
    ft.shutdown(state)
    ft.maybe_setup_simulated_fault(section)
    assert state.fault_tolerance_state == FaultToleranceState()


@pytest.mark.usefixtures("group")
def test_a_fault_on_a_rank_that_is_not_there(sentence: Sentence) -> None:
    with pytest.raises(ConfigError, match="simulated_fault_rank=1:") as caught:
        ft.maybe_setup_simulated_fault(FaultToleranceConfig(simulate_fault=True, simulated_fault_rank=1))
    sentence(caught)


FAULT = """
import sys, time
import torch.distributed as dist
from cloudai_mbridge.training.config.resilience import FaultToleranceConfig
from cloudai_mbridge.training.resilience.fault_tolerance import maybe_setup_simulated_fault
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
config = FaultToleranceConfig(simulate_fault=True, simulated_fault_type=sys.argv[3], simulated_fault_base_delay=1)
if len(sys.argv) > 4:
    config.simulated_fault_rank = int(sys.argv[4])
maybe_setup_simulated_fault(config)
print("armed", flush=True)
time.sleep(8)
"""


def two_ranks(tmp_path: Path, *args: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", FAULT, str(tmp_path / "store")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen([*command, str(rank), *args], stdout=subprocess.PIPE, text=True, env=env) for rank in range(2)
    ]


@pytest.mark.process
@pytest.mark.long
def test_one_rank_at_random_is_killed(tmp_path: Path) -> None:
    processes = two_ranks(tmp_path, "rank_killed")
    outputs = [process.communicate(timeout=1500)[0] for process in processes]
    assert sorted(process.returncode for process in processes) == [-signal.SIGKILL, 0]
    assert sum("Simulated fault: rank_killed on rank" in output for output in outputs) == 1


@pytest.mark.process
@pytest.mark.long
def test_the_configured_rank_hangs(tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path, "rank_hung", "1")
    try:
        first.communicate(timeout=1500)
        assert first.returncode == 0
        time.sleep(0.5)
        assert Path(f"/proc/{second.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    finally:
        second.kill()
        second.communicate()


needs_package = pytest.mark.skipif(not is_installed("nvidia_resiliency_ext"), reason="needs nvidia-resiliency-ext")


def under_monitor(tmp_path: Path, sections: str, *args: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, str(Path(sys.executable).parent / "ft_launcher"), "--nproc-per-node", "2"]
    meeting = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "0"]
    timeouts = ["--ft-workload_check_interval", "1", "--ft-rank_section_timeouts", sections]
    outside = ["--ft-rank_out_of_section_timeout", "60"]
    command = [*launcher, *meeting, *timeouts, *outside, str(HERE / "ft_run.py"), str(tmp_path), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)


@pytest.mark.process
@needs_package
@pytest.mark.drill
def test_the_real_monitor_learns_and_the_next_run_uses_it(tmp_path: Path) -> None:
    for learned in (False, True):
        done = under_monitor(tmp_path, "setup:60,step:60,checkpointing:60")
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("is_out_of_section_calculated=True" in done.stdout) == learned, done.stdout
    kept = json.loads((tmp_path / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert kept["calculated_sections"] == ["checkpointing", "setup", "step"]


@pytest.mark.process
@needs_package
@pytest.mark.drill
def test_the_real_monitor_notices_a_hang(tmp_path: Path) -> None:
    done = under_monitor(tmp_path, "setup:60,step:3,checkpointing:60", "hang")
    assert done.returncode != 0
    assert "Section 'step' has been open for" in done.stdout + done.stderr
