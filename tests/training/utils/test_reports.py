"""Memory, gradient norms, run time and throughput."""

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

import torch

from cloudai_mbridge.training.reporting import reports
from cloudai_mbridge.training.reporting.reports import (
    MEMORY_KEYS,
    report_l2_norm_grad,
    report_memory,
    report_runtime,
    report_throughput,
)
from tests.cases import every


def test_the_memory_keys() -> None:
    where = {"allocated": "allocated", "active": "active", "inactive_split": "inactive", "reserved": "reserved"}
    now = {f"{source}_bytes.all.current": f"mem-{name}-bytes" for source, name in where.items()}
    peak = {f"{source}_bytes.all.peak": f"mem-max-{name}-bytes" for source, name in where.items()}
    counts = {"num_alloc_retries": "mem-alloc-retires", "allocation.all.current": "mem-allocated-count"}
    assert {**now, **peak, **counts} == MEMORY_KEYS


def test_memory_in_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is a fake: this machine has none."""
    stats = {"allocated_bytes.all.current": 1234567890, "active_bytes.all.peak": 0, "num_alloc_retries": 7, "x": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    expected = {"mem-allocated-gigabytes": 1.2346, "mem-max-active-gigabytes": 0, "mem-alloc-retires": 7}
    assert report_memory(None) == report_memory({}) == expected
    assert report_memory({"x": "in-bytes", "y": "absent"}) == {"in-bytes": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_no_memory_report_without_gpu() -> None:
    assert report_memory(None) == {}


class _Chunk(torch.nn.Module):
    def __init__(self, **grads: Any) -> None:
        super().__init__()
        for name, grad in grads.items():
            parameter: Any = torch.nn.Parameter(torch.zeros(2))
            parameter.main_grad = None if grad is None else torch.tensor(grad)
            setattr(self, name, parameter)


def test_gradient_norms_of_several_chunks() -> None:
    """Each counts once in the global norm, and an equal name hides nothing."""
    chunks = [_Chunk(a=[3.0, 4.0], b=None), _Chunk(a=[0.0, 12.0]), _Chunk(c=[84.0, 0.0])]
    assert report_l2_norm_grad(chunks) == {
        "l2_norm/grad/a": 5.0,
        "l2_norm/grad/chunk1.a": 12.0,
        "l2_norm/grad/c": 84.0,
        "l2_norm/grad/global": 85.0,
    }
    assert report_l2_norm_grad([_Chunk(a=None)]) == {"l2_norm/grad/global": 0.0}
    with pytest.raises(AttributeError, match="main_grad"):
        report_l2_norm_grad([torch.nn.Linear(2, 2)])


def _progress(step: int) -> Any:
    return SimpleNamespace(step=step, consumed_train_samples=40)


@every(("unit", "seconds"), [("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400)])
def test_the_run_time(monkeypatch: pytest.MonkeyPatch, unit: str, seconds: int) -> None:
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    assert report_runtime(_progress(5), 1000, 16, 20, unit) == {
        "time/remaining_estimate": pytest.approx(300 / seconds),
        "time/tokens": 640,
        "time/samples": 40,
        "time/batches": 5,
        "time/total": pytest.approx(100 / seconds),
    }


def test_the_run_time_before_the_first_step_and_in_an_unknown_unit(
    monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    report = report_runtime(_progress(0), 1000, 16, 20)
    assert (report["time/remaining_estimate"], report["time/total"]) == (math.inf, 100.0)
    with pytest.raises(ValueError) as caught:
        report_runtime(_progress(1), 0, 1, 1, "weeks")
    sentence(caught)


TRAIN = SimpleNamespace(micro_batch_size=2, global_batch_size=8)


@pytest.mark.parametrize("count", [4, 5])
def test_the_throughput_counts_the_steps_of_the_window(count: int) -> None:
    """One step per 2 s, whether the history holds as many times as the window or one more."""
    history = [10.0 + 2 * i for i in range(count)]
    assert report_throughput(TRAIN, 9, 16, history, 4) == {
        "throughput/batches_per_sec": 0.5,
        "throughput/samples_per_sec": 4.0,
        "throughput/tokens_per_sec": 64.0,
        "throughput/device/batches_per_sec": 0.5,
        "throughput/device/samples_per_sec": 4.0,
        "throughput/device/tokens_per_sec": 64.0,
        "throughput/micro_batch_size": 2,
        "throughput/global_batch_size": 8,
    }


def test_the_throughput_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(reports.dist, "get_world_size", lambda: 4)
    report = report_throughput(TRAIN, 9, 0, [0.0, 1.0], 2)
    assert (report["throughput/samples_per_sec"], report["throughput/device/samples_per_sec"]) == (8.0, 2.0)
    assert not any("tokens" in name for name in report)


def test_no_throughput_before_the_window_is_full_or_if_the_clock_stands(caplog: pytest.LogCaptureFixture) -> None:
    for history, window in (([], 1), ([1.0], 1), ([1.0, 2.0], 3)):
        assert report_throughput(TRAIN, 9, 16, history, window) == {}
    assert report_throughput(TRAIN, 9, 16, [5.0, 5.0], 2) == {}
    assert "no throughput at iteration 9" in caplog.text
