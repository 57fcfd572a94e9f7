"""The progress log: its lines, and what is read back from them."""

import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

from cloudai_mbridge.training.reporting import progress_log
from cloudai_mbridge.training.reporting.progress_log import (
    append_to_progress_log,
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
)
from tests.cases import every

FIRST = "2026-01-02 03:04:05"


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Clock(datetime):
    """A fake clock that stands at 1000 s after the first job's start."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.strptime(FIRST, "%Y-%m-%d %H:%M:%S").replace(minute=20, second=45)


def _cfg(save: Path | None, is_async: bool = False) -> Any:
    checkpoint = SimpleNamespace(save=None if save is None else str(save), async_save=is_async)
    return SimpleNamespace(checkpoint=checkpoint, model=SimpleNamespace(seq_length=1000))


def _state(save: Path | None, **keys: Any) -> Any:
    values: dict[str, Any] = {"start_time": Clock.now().timestamp() - 100, "flops_at_start": 2e15}
    train_state = SimpleNamespace(step=12, consumed_train_samples=3_456_000, floating_point_operations_so_far=9e15)
    is_async = keys.pop("is_async", False)
    return SimpleNamespace(cfg=_cfg(save, is_async), train_state=train_state, **{**values, **keys})


def _line(text: str, world_size: int = 1, start: str = FIRST) -> str:
    return f"{start}\tJob ID: 77\t# GPUs: {world_size}\t{text}\n"


def _saved(flops: str, event: str = "Saved checkpoint", exact: str = "") -> str:
    columns = (event, "Iteration: 5", "Job throughput: 1.0 TFLOP/s/GPU", "Cumulative throughput: 1.0 TFLOP/s/GPU")
    text = "\t".join((*columns, f"Floating-point operations: {flops}", "Tokens (in billions): 0.10"))
    return _line(text + (f"\tExact floating-point operations: {exact}" if exact else ""))


def _start(tmp_path: Path, *lines: str) -> tuple[datetime, float]:
    (tmp_path / "progress.txt").write_text("".join(lines))
    return get_start_time_from_progress_log(_cfg(tmp_path))


def test_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_log, "datetime", Clock)
    append_to_progress_log(str(tmp_path / "new"), "Starting job")
    monkeypatch.delenv("SLURM_JOB_ID")
    append_to_progress_log(str(tmp_path / "new"), "Starting job", barrier=False)
    assert (tmp_path / "new" / "progress.txt").read_text() == (
        "2026-01-02 03:20:45\tJob ID: 77\t# GPUs: 1\tStarting job\n"
        "2026-01-02 03:20:45\tJob ID: \t# GPUs: 1\tStarting job\n"
    )


def test_the_line_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This job: 7e15 FLOPs in 100 s; all jobs: 8e15 in 1000 s. The job's own start is what its rate subtracts."""
    monkeypatch.setattr(progress_log, "datetime", Clock)
    (tmp_path / "progress.txt").write_text(_saved("1.00e+15") + _line("Starting job"))
    compute_throughputs_and_append_to_progress_log(_state(tmp_path), 9e15)
    assert (tmp_path / "progress.txt").read_text().splitlines()[-1] == (
        "2026-01-02 03:20:45\tJob ID: 77\t# GPUs: 1\tSaved checkpoint\tIteration: 12\t"
        "Job throughput: 70.0 TFLOP/s/GPU\tCumulative throughput: 8.0 TFLOP/s/GPU\t"
        "Floating-point operations: 9.00e+15\tTokens (in billions): 3.46\t"
        "Exact floating-point operations: 9000000000000000"
    )


def test_no_time_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_log, "datetime", Clock)
    (tmp_path / "progress.txt").write_text(_line("Starting job", start="2026-01-02 03:20:45"))
    compute_throughputs_and_append_to_progress_log(_state(tmp_path, start_time=Clock.now().timestamp()), 9e15)
    line = (tmp_path / "progress.txt").read_text().splitlines()[-1]
    assert "Job throughput: 0.0 TFLOP/s/GPU\tCumulative throughput: 0.0 TFLOP/s/GPU" in line


def test_nothing_is_written_without_checkpoints(tmp_path: Path) -> None:
    compute_throughputs_and_append_to_progress_log(_state(None), 1.0)
    assert os.listdir(tmp_path) == []


def test_the_first_job_counts(tmp_path: Path) -> None:
    later = _line("Starting job", start="2027-01-01 00:00:00")
    assert _start(tmp_path, _line("Starting job"), _saved("2.50e+15"), later) == (datetime(2026, 1, 2, 3, 4, 5), 0.0)


def test_another_world_size_starts_anew(tmp_path: Path) -> None:
    other = _line("Starting job", world_size=8)
    later = _line("Starting job", start="2027-01-01 00:00:00")
    lines = (_line("Starting job"), _saved("2.50e+15"), other, later)
    assert _start(tmp_path, *lines) == (datetime(2027, 1, 1), 2.5e15)


@pytest.mark.parametrize(("commit", "flops"), [("Saved async checkpoint\tIteration: 5", 2.5e15), ("", 1e15)])
def test_an_asynchronous_save_counts_when_it_has_ended(tmp_path: Path, commit: str, flops: float) -> None:
    lines = [_saved("1.00e+15"), _saved("2.50e+15", "Saving async checkpoint")]
    lines += [_line(commit)] if commit else []
    assert _start(tmp_path, *lines, _line("Starting job"))[1] == flops


def test_an_asynchronous_save_is_read_back(tmp_path: Path) -> None:
    append_to_progress_log(str(tmp_path), "Starting job")
    compute_throughputs_and_append_to_progress_log(_state(tmp_path, is_async=True), 1234567890123456.0)
    append_to_progress_log(str(tmp_path), "Saved async checkpoint\tIteration: 12")
    path = tmp_path / "progress.txt"
    path.write_text(path.read_text().replace("Starting job", "Another line") + _line("Starting job"))
    assert get_start_time_from_progress_log(_cfg(tmp_path))[1] == 1234567890123456.0


def test_flops_come_back_exactly(tmp_path: Path) -> None:
    saved = _saved("1.23e+21", exact="1.2345678901234567e+21")
    assert _start(tmp_path, saved, _line("Starting job"))[1] == 1.2345678901234567e21


@every(
    "damaged",
    ["\n", "no columns\n", _saved("no number"), _line("Starting job").replace("# GPUs: 1", "# GPUs: x"), "\t\t\t\n",
     _line("Saved checkpoint"), _line("Saved async checkpoint"), FIRST + "\tJob ID: 7"],
)  # fmt: skip
def test_a_damaged_line_is_passed_over(tmp_path: Path, damaged: str) -> None:
    assert _start(tmp_path, _saved("2.50e+15"), damaged, "\n", _line("Starting job"))[1] == 2.5e15


def test_no_job_of_this_world_size(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(AssertionError) as caught:
        _start(tmp_path, _line("Starting job", world_size=2))
    sentence(caught)
    with pytest.raises(AssertionError) as caught:
        get_start_time_from_progress_log(_cfg(tmp_path / "absent"))
    sentence(caught)
    with pytest.raises(AssertionError, match=r"checkpoint\.save"):
        get_start_time_from_progress_log(_cfg(None))
