"""The adapter of the straggler detection, on a fake detector; the real one where the package is installed."""

import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

from cloudai_mbridge.training.config.resilience import NVRxStragglerDetectionConfig
from cloudai_mbridge.training.resilience import straggler
from cloudai_mbridge.training.resilience.packages import is_installed
from cloudai_mbridge.training.resilience.straggler import (
    NVRxStragglerDetectionManager,
    check_nvrx_straggler_detection,
    safe_shutdown_nvrx_straggler_manager,
)

HERE = Path(__file__).parent


class FakeReport:
    """Fakes the package's report of some ranks' scores."""

    def __init__(self, *scores: float) -> None:
        self.gpu_relative_perf_scores = dict(enumerate(scores))
        self.gpu_individual_perf_scores = dict.fromkeys(range(len(scores)), 1.0)
        self.rank_to_node = {rank: f"node{rank // 2}" for rank in range(len(scores))}

    def identify_stragglers(self, gpu_rel_threshold: float, gpu_indiv_threshold: float) -> dict[str, Any]:
        scored = (
            (self.gpu_relative_perf_scores, gpu_rel_threshold),
            (self.gpu_individual_perf_scores, gpu_indiv_threshold),
        )
        slow = [{rank for rank, score in scores.items() if score < threshold} for scores, threshold in scored]
        relative, individual = (frozenset(_Straggler(rank) for rank in ranks) for ranks in slow)
        return {"straggler_gpus_relative": set(relative), "straggler_gpus_individual": set(individual)}


class _Straggler:
    def __init__(self, rank: int) -> None:
        self.rank, self.node = rank, f"node{rank // 2}"


class FakeDetector:
    """Fakes the package's Detector: it remembers the calls."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.report: FakeReport | None = None
        self.shutdowns = 0
        self.measured = 0

    def initialize(self, **settings: Any) -> None:
        self.settings = settings

    def wrap_callables(self, ids: list[Any]) -> None:
        hash(ids[0])  # a key of the package's dictionary
        ((owner, name),) = ids
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.measured += 1
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)

    def generate_report_if_interval_elapsed(self) -> FakeReport | None:
        return self.report

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> FakeDetector:
    fake = FakeDetector()
    package = SimpleNamespace(Detector=fake, CallableId=lambda owner, name: (owner, name))
    monkeypatch.setattr(straggler, "nvrx", lambda part: package)
    return fake


def running(**settings: Any) -> NVRxStragglerDetectionManager:
    manager = NVRxStragglerDetectionManager(NVRxStragglerDetectionConfig(enabled=True, **settings))
    manager.initialize()
    return manager


@pytest.mark.skipif(is_installed("nvidia_resiliency_ext"), reason="the package is installed")
def test_without_the_package() -> None:
    with pytest.raises(ImportError, match="nvidia_resiliency_ext"):
        NVRxStragglerDetectionManager(NVRxStragglerDetectionConfig(enabled=True))
    assert not check_nvrx_straggler_detection(None)
    safe_shutdown_nvrx_straggler_manager(None)


def test_settings_and_life(detector: FakeDetector, sentence: Sentence) -> None:
    manager = running(calc_individual_gpu_perf=False, profiling_interval=3, report_time_interval=7.0)
    assert detector.settings == {
        "scores_to_compute": ["relative_perf_scores"],
        "gather_on_rank0": True,
        "profiling_interval": 3,
        "report_time_interval": 7.0,
    }
    with pytest.raises(RuntimeError) as caught:
        manager.initialize()
    sentence(caught)
    manager.shutdown()
    manager.shutdown()
    assert detector.shutdowns == 1
    assert not manager.check_stragglers(0)


def test_a_detector_that_is_off(detector: FakeDetector) -> None:
    manager = NVRxStragglerDetectionManager(NVRxStragglerDetectionConfig())
    manager.initialize()
    assert detector.settings == {}
    assert manager.wrap_train_step_function(len) is len
    assert not manager.check_stragglers(0)


def test_the_step_is_measured(detector: FakeDetector) -> None:
    step = running().wrap_train_step_function(lambda first, second: first - second)
    assert step(5, second=3) == 2
    assert detector.measured == 1


def test_a_step_that_cannot_be_wrapped_runs_as_it_is(
    detector: FakeDetector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(detector, "wrap_callables", None)
    assert running().wrap_train_step_function(len) is len
    assert "not measured" in caplog.text


def test_report(detector: FakeDetector, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    manager = running(num_gpu_perf_scores_to_print=2, calc_individual_gpu_perf=False)
    assert not manager.check_stragglers(0)
    assert capsys.readouterr().out == ""
    detector.report = FakeReport(1.0, 0.9, 0.5, 0.8, 0.97, math.nan)
    assert not manager.check_stragglers(0)  # without stop_if_detected nobody is told
    assert capsys.readouterr().out.splitlines() == [
        "GPU relative performance, worst 2 of 5 ranks:",
        "  Rank=2 Node=node1 Score=0.50",
        "  Rank=3 Node=node1 Score=0.80",
        "GPU relative performance, best 2 of 5 ranks:",
        "  Rank=0 Node=node0 Score=1.00",
        "  Rank=4 Node=node2 Score=0.97",
        "STRAGGLER DETECTED: Rank=2 Node=node1",
    ]
    assert "GPU relative performance: min 0.5000, median 0.9000, max 1.0000" in caplog.text
    detector.report = FakeReport(0.95, 0.9, 0.85, 0.8)
    assert not manager.check_stragglers(0)
    assert capsys.readouterr().out.splitlines() == [
        "GPU relative performance of all 4 ranks:",
        *(f"  Rank={rank} Node=node{rank // 2} Score={0.95 - 0.05 * rank:.2f}" for rank in (3, 2, 1, 0)),
    ]
    detector.report = FakeReport(math.nan)
    assert not manager.check_stragglers(0)
    assert "no kernel was measured" in caplog.text


def test_a_shutdown_that_fails_ends_nothing(detector: FakeDetector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "shutdown", None)
    safe_shutdown_nvrx_straggler_manager(running())


UNEQUAL_INTERVALS = """
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
from cloudai_mbridge.training.config.resilience import NVRxStragglerDetectionConfig
from cloudai_mbridge.training.resilience import straggler

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, steps = dist.get_rank(), 0
slow = type("Straggler", (), {"rank": 1, "node": "n"})()
report = SimpleNamespace(
    gpu_relative_perf_scores={0: 1.0, 1: 0.1}, gpu_individual_perf_scores={}, rank_to_node={0: "n", 1: "n"},
    identify_stragglers=lambda **_: {"straggler_gpus_relative": {slow}, "straggler_gpus_individual": set()})
detector = SimpleNamespace(  # fakes the package: the interval elapses on rank 0 in step 3, on rank 1 in step 2
    initialize=lambda **_: None, shutdown=lambda: None,
    generate_report_if_interval_elapsed=lambda: report if steps == 3 - rank else None)
straggler.nvrx = lambda part: SimpleNamespace(Detector=detector)
manager = straggler.NVRxStragglerDetectionManager(
    NVRxStragglerDetectionConfig(enabled=True, stop_if_detected=True, num_gpu_perf_scores_to_print=0))
manager.initialize()
while True:
    steps += 1
    if straggler.check_nvrx_straggler_detection(manager):
        break
straggler.safe_shutdown_nvrx_straggler_manager(manager)
dist.barrier()
dist.destroy_process_group()
print(f"stopped after {steps}")
"""


def test_ranks_with_unequal_intervals_stop_together(ranks: Callable[..., Any]) -> None:
    done = ranks(2, UNEQUAL_INTERVALS)
    assert done.stdout.count("stopped after 3") == 2
    assert done.stdout.count("STRAGGLER DETECTED: Rank=1 Node=n") == 1


@pytest.mark.process
@pytest.mark.drill
@pytest.mark.skipif(not is_installed("nvidia_resiliency_ext"), reason="needs nvidia-resiliency-ext")
def test_the_real_detector_finds_the_slow_rank() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(HERE / "nvrx_straggler_run.py")
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("stopped") == 2
    assert "STRAGGLER DETECTED: Rank=1" in done.stdout
    assert "  Rank=1 Node=" in done.stdout
    assert "Score=0.33" in done.stdout
