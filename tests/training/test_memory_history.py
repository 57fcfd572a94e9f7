"""The allocator's history: which ranks record it, and where the snapshots go. The allocator itself is a fake here."""

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from cloudai_mbridge.training import profiling
from cloudai_mbridge.training.config import ProfilingConfig

SNAPSHOT = {"segments": [], "device_traces": []}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fake the GPU's allocator: the calls that were made, and the observers that were attached."""
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "_record_memory_history", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(memory, "_snapshot", lambda: SNAPSHOT)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", calls.append, raising=False)
    return calls


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda value: monkeypatch.setenv("RANK", str(value))


def config(directory: Path, **fields: Any) -> ProfilingConfig:
    path = str(directory / "memory" / "snapshot.pickle")
    return ProfilingConfig(**{"record_memory_history": True, "memory_snapshot_path": path, **fields})


def read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def test_it_records_with_python_stacks(tmp_path: Path, gpu: list[Any], rank: Any) -> None:
    rank(3)
    profiling.start_memory_history_recording(config(tmp_path))
    recorded, _ = gpu
    assert recorded == (("all",), {"context": "all", "stacks": "python", "max_entries": 100_000})


def test_running_out_of_memory_writes_a_snapshot_of_the_rank(tmp_path: Path, gpu: list[Any], rank: Any) -> None:
    rank(3)
    profiling.start_memory_history_recording(config(tmp_path))
    _, observer = gpu
    observer(0, 1 << 30, 1 << 34, 0)
    assert read(tmp_path / "memory" / "snapshot_oom_rank-3.pickle") == SNAPSHOT


@pytest.mark.parametrize(("ranks", "recorded"), [([], [0, 1, 2]), ([1], [1]), ([0, 2], [0, 2])])
def test_an_empty_list_of_ranks_means_all(
    tmp_path: Path, gpu: list[Any], rank: Any, ranks: list[int], recorded: list[int]
) -> None:
    c = config(tmp_path, profile_ranks=ranks)
    for value in range(3):
        rank(value)
        profiling.start_memory_history_recording(c)
        profiling.dump_memory_snapshot(c, c.profile_step_end, value)
    assert len(gpu) == 2 * len(recorded)
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == [f"snapshot_{r}.pickle" for r in recorded]


def test_the_snapshot_is_taken_at_the_end_of_the_window(tmp_path: Path, gpu: list[Any]) -> None:
    c = config(tmp_path, profile_step_end=12)
    profiling.dump_memory_snapshot(c, 11, 0)
    profiling.dump_memory_snapshot(c, 13, 0)
    assert not (tmp_path / "memory").exists()
    profiling.dump_memory_snapshot(c, 12, 0)
    assert read(tmp_path / "memory" / "snapshot_0.pickle") == SNAPSHOT


def test_training_that_ends_before_the_window_leaves_a_snapshot(tmp_path: Path, gpu: list[Any]) -> None:
    c = config(tmp_path, profile_step_end=12)
    profiling.finish_profiling(c, 0, None, iteration=12)
    assert not (tmp_path / "memory").exists()
    profiling.finish_profiling(c, 0, None, iteration=11)
    assert read(tmp_path / "memory" / "snapshot_0.pickle") == SNAPSHOT


def test_off_means_off(tmp_path: Path, gpu: list[Any]) -> None:
    for c in (None, config(tmp_path, record_memory_history=False)):
        profiling.start_memory_history_recording(c)
        profiling.dump_memory_snapshot(c, 12, 0)
    assert gpu == []
    assert not (tmp_path / "memory").exists()


def test_without_a_gpu_one_line_says_so(tmp_path: Path, rank: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    c = config(tmp_path)
    for value in range(3):
        rank(value)
        profiling.start_memory_history_recording(c)
        profiling.dump_memory_snapshot(c, c.profile_step_end, value)
    assert capsys.readouterr().out.count("memory history: it needs a GPU") == 1
    assert not (tmp_path / "memory").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_the_snapshot_holds_what_was_allocated(tmp_path: Path, rank: Any) -> None:
    rank(0)
    c = config(tmp_path)
    profiling.start_memory_history_recording(c)
    kept = torch.empty(1 << 20, device=torch.accelerator.current_accelerator())
    profiling.dump_memory_snapshot(c, c.profile_step_end, 0)
    sizes = [
        entry["size"] for trace in read(tmp_path / "memory" / "snapshot_0.pickle")["device_traces"] for entry in trace
    ]
    assert kept.nbytes in sizes
