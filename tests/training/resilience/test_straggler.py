"""Megatron's straggler detector: off for good without a GPU, and sound where a rank has measured nothing."""

import math
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from megatron.core.utils import StragglerDetector

from cloudai_mbridge.training.resilience import straggler

GUARDED = straggler.GuardedStragglerDetector


class Event:
    """Fakes a GPU event; stops are `ms` later than starts."""

    def __init__(self, ms: float = 0.0) -> None:
        self.ms = ms

    def elapsed_time(self, stop: "Event") -> float:
        return stop.ms - self.ms


def measured(detector: Any, forward_ms: list[float], batch_ms: list[float]) -> None:
    """Put measured sections into the detector, as start and stop would have."""
    detector.start_gemm_ev, detector.stop_gemm_ev = [Event() for _ in forward_ms], [Event(ms) for ms in forward_ms]
    detector.start_gemm_tm, detector.stop_gemm_tm = [1] * len(forward_ms), [2] * len(forward_ms)
    detector.start_data_ev, detector.stop_data_ev = [Event() for _ in batch_ms], [Event(ms) for ms in batch_ms]
    detector.start_data_tm, detector.stop_data_tm = [1] * len(batch_ms), [2] * len(batch_ms)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave Megatron's singleton as it was."""
    monkeypatch.setattr(StragglerDetector, "_instance", StragglerDetector())
    monkeypatch.setattr(StragglerDetector, "_configured", False)


@pytest.fixture
def detector(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A detector that is on, with a faked GPU's readings."""
    for name, value in (("temperature", 40), ("power_draw", 300), ("utilization", 90), ("clock_rate", 1800)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    made = straggler.straggler_timer()
    made._off, made.world, made.dev = False, 1, torch.device("cpu")
    return made


def test_the_singleton_becomes_ours_and_keeps_its_state(fresh: None) -> None:
    ours = straggler.straggler_timer()
    ours.mmcnt = 5
    assert StragglerDetector() is straggler.straggler_timer() is ours
    assert isinstance(ours, GUARDED)
    assert ours.mmcnt == 5  # Megatron's own resets it whenever the singleton is asked for


def test_elapsed_sums_the_sections(detector: Any) -> None:
    measured(detector, [10.0, 30.0], [2.0, 5.0, 1.0])
    assert detector.elapsed() == (40.0, 5.0, 40.0, 300.0, 90.0, 1800.0)
    assert detector.elapsed()[:2] == (0.0, 0.0)


@pytest.mark.parametrize("lists", [["stop_gemm_ev", "stop_gemm_tm"], ["stop_data_ev"], ["start_gemm_tm"]])
def test_starts_and_stops_that_do_not_match_count_as_nothing(
    detector: Any, lists: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(detector, [10.0, 30.0], [2.0])
    for name in lists:
        getattr(detector, name).pop()
    assert detector.elapsed() == (0.0, 0.0, 40.0, 300.0, 90.0, 1800.0)
    assert "do not match; interval left out" in capsys.readouterr().out
    measured(detector, [10.0], [])
    assert detector.elapsed()[0] == 10.0
    measured(detector, [10.0, 30.0], [])
    detector.stop_gemm_tm[-1] = 0  # it never stopped
    assert detector.elapsed()[0] == 0.0


def test_readings_without_their_library_are_unknown(detector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "power_draw", missing)
    measured(detector, [10.0], [])
    forward_ms, _, *readings = detector.elapsed()
    assert forward_ms == 10.0
    assert all(math.isnan(value) for value in readings)


SCRIPT = """
    import socket
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist
    from megatron.core.utils import StragglerDetector

    from cloudai_mbridge.training.config import StragglerDetectionConfig
    from cloudai_mbridge.training.resilience import straggler
    from cloudai_mbridge.training.process.log_lines import write_line
    from test_straggler import measured

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    timer = straggler.straggler_timer()
    config = StragglerDetectionConfig(log_straggler=True)
    state = SimpleNamespace(cfg=SimpleNamespace(straggler=config), straggler_timer=timer)

    # as it is on a CPU
    straggler.configure_straggler(state)
    with timer(bdata=True):
        pass
    with timer:
        pass
    write_line(f"off {rank}: {timer.enabled} {timer.report(1e12, 10)} {timer.start == timer.null_method}")

    # as it is on a GPU, with injected measurements
    for name, value in (("temperature", 40), ("power_draw", 300), ("utilization", 90), ("clock_rate", 1800)):
        setattr(torch.cuda, name, lambda value=value + rank: value)
    torch.cuda.synchronize = lambda *_: None
    timer._off, timer.world, timer.rank, timer.mmcnt, timer.dev = False, 2, rank, 1, torch.device("cpu")
    def report(name, forward_ms, batch_ms, flops=4e12, interval=2):
        measured(timer, forward_ms, batch_ms)
        if name == "unmatched" and rank == 1:
            timer.stop_gemm_ev.pop()
        write_line(f"{name} {rank}: {timer.report(flops, interval)}")
        dist.barrier()
    report("both", [100.0 * (1 + rank)], [3.0 - rank])
    report("nothing", [100.0] if rank == 0 else [], [])
    report("unmatched", [100.0], [])
    report("no flops", [100.0], [], flops=0.0)

    # rank 0 is asked over HTTP to switch off
    timer.port = 0
    timer._controller()
    if rank == 0:
        with socket.create_connection(("127.0.0.1", timer.sock.getsockname()[1])) as connection:
            connection.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            write_line("answer: " + connection.recv(1000).decode().splitlines()[-1])
    write_line(f"before {rank}: {timer.enabled}")
    timer.report(4e12, 2)
    write_line(f"after {rank}: {timer.enabled}")
    dist.destroy_process_group()
"""


def test_reports_of_two_ranks(ranks: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    start = f"import sys\nsys.path.insert(0, {str(request.path.parent)!r})\n"
    lines = ranks(2, start + textwrap.dedent(SCRIPT)).stdout.splitlines()
    said = {line for line in lines if re.match(r"[a-z ]+ \d: ", line)}
    expected = {
        "off": ["False False True", "False False True"],
        "both": ["True", "False"],
        "nothing": ["True", "False"],
        "unmatched": ["True", "False"],
        "no flops": ["False", "False"],
        "before": ["True", "True"],
        "after": ["False", "False"],
    }
    assert said == {f"{name} {rank}: {each[rank]}" for name, each in expected.items() for rank in (0, 1)}
    assert sum("the detector stays off" in line for line in lines) == 1
    assert any(line.startswith("answer: Will turn StragglerDetector OFF") for line in lines)
    both, nothing, unmatched, _ = [line for line in lines if "MnEtpt/Rnk" in line]
    # 4e12 FLOPs in 2 steps of 50 and 100 ms over 2 ranks, forward only: 2e12 / (ms * 1e9 * 2) / 3
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \| MnRtt/Rnk: 50.00ms/0 \| MxRtt/Rnk: 100.00ms/1"
        r" \| MnPwr/Rnk: 300.00W/0 \| MxPwr/Rnk: 301.00W/1 \| MnTmp/Rnk: 40.00C/0 \| MxTmp/Rnk: 41.00C/1"
        r" \| MnUtl/Rnk: 90.00%/0 \| MxUtl/Rnk: 91.00%/1 \| MnClk/Rnk: 1800.00MHz/0 \| MxClk/Rnk: 1801.00MHz/1"
        r" \| MnDRtt/Rnk: 2.00ms/1 \| MxDRtt/Rnk: 3.00ms/0 \| MnEtpt/Rnk: 3.33TF/1 \| MxEtpt/Rnk: 6.67TF/0",
        both,
    )
    for line in (nothing, unmatched):
        assert "MnRtt/Rnk: 0.00ms/1 | MxRtt/Rnk: 50.00ms/0" in line
        assert "MnEtpt/Rnk: 0.00TF/1 | MxEtpt/Rnk: 6.67TF/0" in line


def test_the_ranking_names_both_ends(detector: Any) -> None:
    from megatron.core.utils import _StragglerData, _ValueWithRank

    found = _StragglerData()
    found.aflops = [_ValueWithRank(float(value), rank) for rank, value in enumerate([10, 20, 30, 40])]
    assert straggler._report_lines(found, 1, 4)[1:] == []
    assert straggler._report_lines(found, 4, 4)[1:] == []
    assert straggler._report_lines(found, 2, 4)[1:] == [
        "^^^^ Bottom 2 Ranks with lowest  Etpt(TF): 10.00/0, 20.00/1,",
        "^^^^ Top    2 Ranks with highest Etpt(TF): 30.00/2, 40.00/3,",
    ]
