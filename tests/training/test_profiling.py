"""The profilers write what was asked for, on the ranks and for the steps that were asked for."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from cloudai_mbridge.training import profiling
from cloudai_mbridge.training.config import ProfilingConfig
from tests.cases import every

WARMUP = "ignore:Profiler won't be using warmup:UserWarning"


def config(**fields: Any) -> ProfilingConfig:
    fields = {"use_pytorch_profiler": True, "profile_step_start": 2, "profile_step_end": 4, **fields}
    made = ProfilingConfig(**fields)
    made.finalize()
    return made


def loop(c: ProfilingConfig, directory: Path, steps: int = 6, rank: int = 0, first_step: int = 0) -> Any:
    """Go through the hooks as the training loop does."""
    prof = profiling.initialize_pytorch_profiler(c, directory, rank, first_step)
    if prof is not None:
        prof.start()
    capture = None
    step = first_step
    while step < steps:
        capture = profiling.handle_profiling_step(c, step, rank, prof) or capture
        torch.ones(8, 8) @ torch.ones(8, 8)
        step += 1
        profiling.handle_profiling_stop(c, step, rank, prof, capture)
    profiling.finish_profiling(c, rank, prof, capture, iteration=step)
    return prof


def traces(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the traces by rank."""
    found = sorted(directory.glob("*.pt.trace.json"))
    by_rank = {int(re.match(r"rank-(\d+)\.", path.name)[1]): json.loads(path.read_text()) for path in found}  # type: ignore[index]
    assert len(by_rank) == len(found), "more than one trace of a rank"
    return by_rank


def profiled_steps(trace: dict[str, Any]) -> list[int]:
    names = {e["name"] for e in trace["traceEvents"] if str(e.get("name")).startswith("ProfilerStep#")}
    return sorted(int(name.partition("#")[2]) for name in names)


def num_matmuls(trace: dict[str, Any]) -> int:
    return sum(e.get("name") == "aten::mm" for e in trace["traceEvents"])


# ---- which ranks


@every(("ranks", "profiled"), [([], [0, 1, 2, 3]), ([0], [0]), ([1, 3], [1, 3]), ([7], [])])
def test_an_empty_list_of_ranks_means_all(ranks: list[int], profiled: list[int]) -> None:
    c = config(profile_ranks=ranks)
    assert [rank for rank in range(4) if profiling.should_profile_rank(c, rank)] == profiled


def test_without_a_section_nothing_is_profiled() -> None:
    assert not profiling.should_profile_rank(None, 0)
    assert profiling.initialize_pytorch_profiler(None) is None
    assert profiling.handle_profiling_step(None, 0, 0, None) is None
    profiling.handle_profiling_stop(None, 1, 0, None)
    profiling.finish_profiling(None, 0, None, iteration=1)


def test_only_the_listed_ranks_write(tmp_path: Path) -> None:
    for rank in range(3):
        loop(config(profile_ranks=[0, 2]), tmp_path, rank=rank)
    assert sorted(traces(tmp_path)) == [0, 2]


# ---- which steps


@pytest.mark.filterwarnings(WARMUP)
@every(
    ("start", "end", "first_step", "steps"),
    [
        pytest.param(2, 4, 0, [2, 3], id="after a wait"),
        pytest.param(1, 2, 0, [1], id="the first, warmed up before it"),
        pytest.param(0, 2, 0, [0, 1], id="from the start"),
        pytest.param(4, 6, 3, [1, 2], id="resumed before the window"),
        pytest.param(1, 6, 3, [0, 1, 2], id="resumed inside the window"),
    ],
)
def test_the_trace_holds_the_window(tmp_path: Path, start: int, end: int, first_step: int, steps: list[int]) -> None:
    loop(config(profile_step_start=start, profile_step_end=end), tmp_path, steps=8, first_step=first_step)
    assert profiled_steps(traces(tmp_path)[0]) == steps
    assert num_matmuls(traces(tmp_path)[0]) == len([step for step in steps if step > 0])


@every(("start", "end", "first_step"), [(3, 3, 0), (0, 0, 0), (2, 4, 4)])
def test_an_empty_window_is_said_and_profiles_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: int, end: int, first_step: int
) -> None:
    assert loop(config(profile_step_start=start, profile_step_end=end), tmp_path, first_step=first_step) is None
    assert not traces(tmp_path)
    assert (
        f"no step to profile in [{start}, {end}) when training starts with {first_step} steps"
        in capsys.readouterr().out
    )


def test_training_that_ends_inside_the_window_writes_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prof = loop(config(profile_step_end=20, pytorch_profiler_collect_chakra=True), tmp_path)
    assert not prof.is_running
    assert profiled_steps(traces(tmp_path)[0]) == [2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "chakra" / "rank-0.json").read_text())["nodes"]
    assert "training ended after 6 steps, before the end of the window [2, 20)" in capsys.readouterr().out


def test_training_that_ends_before_the_window_stops_the_profiler(tmp_path: Path) -> None:
    for start in (6, 7, 30):  # while recording, while warming up, while waiting
        prof = loop(config(profile_step_start=start, profile_step_end=40), tmp_path / str(start))
        assert not prof.is_running
    assert [len(traces(tmp_path / str(start))) for start in (6, 7, 30)] == [1, 0, 0]


def test_a_window_that_was_over_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prof = loop(config(), tmp_path)
    prof.stop()
    assert len(list(tmp_path.iterdir())) == 1
    assert capsys.readouterr().out == ""


# ---- what is in the trace


def test_shapes_stacks_and_execution_traces_are_there_when_asked_for(tmp_path: Path) -> None:
    asked = {"pytorch_profiler_collect_callstack": True, "pytorch_profiler_collect_chakra": True}
    loop(config(record_shapes=True, **asked), tmp_path / "all")
    loop(config(pytorch_profiler_collect_shapes=True), tmp_path / "shapes")
    loop(config(), tmp_path / "none")
    mm = {
        name: next(e["args"] for e in traces(tmp_path / name)[0]["traceEvents"] if e.get("name") == "aten::mm")
        for name in ("all", "shapes", "none")
    }
    assert mm["all"]["Input Dims"] == mm["shapes"]["Input Dims"] == [[8, 8], [8, 8]]
    assert "Input Dims" not in mm["none"]
    stacked = {
        name: any(e.get("cat") == "python_function" for e in traces(tmp_path / name)[0]["traceEvents"]) for name in mm
    }
    assert stacked == {"all": True, "shapes": False, "none": False}
    graph = json.loads((tmp_path / "all" / "chakra" / "rank-0.json").read_text())
    assert sum(node["name"] == "aten::mm" for node in graph["nodes"]) == 2
    assert not (tmp_path / "none" / "chakra").exists()


def test_the_default_directory_is_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop(config(), None)  # type: ignore[arg-type]
    assert list(traces(tmp_path / "torch_profile")) == [0]


# ---- ranges for Nsight Systems


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake the GPU's side: what was switched on and off, in order."""
    events: list[str] = []

    class Runtime:
        def cudaProfilerStart(self) -> int:  # noqa: N802
            events.append("start")
            return 0

        def cudaProfilerStop(self) -> int:  # noqa: N802
            events.append("stop")
            return 0

    @contextlib.contextmanager
    def emit_nvtx(record_shapes: bool = False) -> Iterator[None]:
        events.append(f"ranges shapes={record_shapes}")
        yield
        events.append("no ranges")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit_nvtx)
    return events


def nsys(**fields: Any) -> ProfilingConfig:
    return config(use_pytorch_profiler=False, use_nsys_profiler=True, **fields)


def test_nsys_records_its_window(tmp_path: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", lambda *_: gpu.append("step") or _Matrix())
    loop(nsys(record_shapes=True), tmp_path, rank=3)
    step = ["step", "step"]  # each makes two matrices
    opened = ["start", "ranges shapes=True"]
    assert gpu == [*step, *step, *opened, *step, *step, "no ranges", "stop", *step, *step]


class _Matrix:
    def __matmul__(self, other: Any) -> None: ...


def test_nsys_is_closed_when_training_ends_early(tmp_path: Path, gpu: list[str]) -> None:
    loop(nsys(profile_step_end=20), tmp_path)
    assert gpu == ["start", "ranges shapes=False", "no ranges", "stop"]


def test_nsys_is_closed_when_the_last_step_of_the_window_was_skipped(gpu: list[str]) -> None:
    c = nsys()
    capture = profiling.handle_profiling_step(c, 2, 0, None)
    profiling.handle_profiling_stop(c, 3, 0, None, capture)
    profiling.handle_profiling_stop(c, 5, 0, None, capture)  # not called for step 4, which was skipped
    assert "stop" not in gpu
    profiling.finish_profiling(c, 0, None, capture, iteration=5)
    assert gpu[-1] == "stop"


def test_nsys_leaves_other_ranks_and_empty_windows_alone(tmp_path: Path, gpu: list[str]) -> None:
    loop(nsys(profile_ranks=[1]), tmp_path)
    loop(nsys(profile_step_end=2), tmp_path)
    assert gpu == []


def test_megatrons_ranges_are_switched_with_the_capture(gpu: list[str]) -> None:
    from megatron.core import utils

    capture = profiling.start_nsys_profiler(nsys(nvtx_ranges=True))
    assert utils._nvtx_enabled
    profiling.stop_nsys_profiler(capture)
    profiling.stop_nsys_profiler(capture)
    assert not utils._nvtx_enabled
    assert gpu.count("stop") == 1


def test_nsys_without_a_gpu_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for rank in range(2):
        loop(nsys(), tmp_path, rank=rank)
    assert capsys.readouterr().out.count("need a GPU; this run has none") == 1


# ---- in a real run


@pytest.mark.long
def test_a_real_run_on_two_ranks(train: Callable[..., Any], tmp_path: Path) -> None:
    section = {
        "use_pytorch_profiler": True,
        "pytorch_profiler_collect_chakra": True,
        "profile_step_start": 2,
        "profile_step_end": 4,
    }
    done = train(2, {"profiling": section, "logger": {"tensorboard_dir": "tb"}}, "train.train_iters=5")
    assert len(done.records) == 5
    found = traces(tmp_path / "tb")
    assert {rank: profiled_steps(trace) for rank, trace in found.items()} == {0: [2, 3], 1: [2, 3]}
    for rank in found:
        assert json.loads((tmp_path / "tb" / "chakra" / f"rank-{rank}.json").read_text())["nodes"]
