"""The stream of a log: whole, cut, damaged, repeated, ours and upstream's."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.logs import LogParser, LogSummary, parser, read_log
from tests.cases import every


def _record(step: Any, loss: Any = 5.0, time_s: Any = 1.5, **more: Any) -> str:
    values = {"version": 1, "step": step, "step_time_s": time_s, "tflops_per_gpu": 2.5, "losses": {"lm loss": loss}}
    return "MBRIDGE_STEP " + json.dumps({**values, **more}) + "\n"


def _time(seconds: float = 1.5, tflops: float = 2.5) -> str:
    return f"Step Time : {seconds:.2f}s GPU utilization: {tflops:.1f}MODEL_TFLOP/s/GPU\n"


def _iteration(step: int, loss: float | None = 5.0, nan_iterations: int = 0, total: int = 9) -> str:
    shown = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" [2026-01-02 03:04:05] iteration {step:8d}/{total:8d} | consumed samples:            8 |"
        f" global batch size:     8 |{shown} loss scale: 1.0 | grad norm: 0.500 |"
        f" number of skipped iterations:   0 | number of nan iterations: {nan_iterations:3d} |\n"
    )


def _parse(text: str | bytes) -> LogSummary:
    parser = LogParser()
    parser.feed(text if isinstance(text, bytes) else text.encode())
    return parser.finish()


MIXED = (
    'MBRIDGE_RUN {"version": 1, "world_size": 2}\n'
    + _time()
    + _iteration(1)
    + _record(1, 6.25)
    + "WARNING: é 😀 \u2028 something\r\n"
    + _record(2, "nan")
    + "MBRIDGE_STEP {cut\n"
    + _record(2, 4.5)
    + "progress\r50%\r"
    + _record(3, 4.25, grad_norm=0.5).rstrip("\n")
).encode() + b"\xff\xfe\x00"


def test_records_are_read_at_full_precision() -> None:
    summary = _parse(_record(1, 5.123456789012345, 0.12345678901234567, grad_norm=1.25, peak_memory_gib=1.5))
    (step,) = summary.steps
    assert (step.step, step.loss, step.step_time_s) == (1, 5.123456789012345, 0.12345678901234567)
    assert (step.tflops_per_gpu, step.grad_norm, step.peak_memory_gib) == (2.5, 1.25, 1.5)
    assert (summary.source, summary.notes) == ("records", ())
    assert _parse(_record(1)).steps[0].peak_memory_gib is None


@every("step", [-1, 10**15, 10**30, True, 1.0, "1", None])
def test_a_step_that_is_no_number_of_a_step_is_damaged(step: Any) -> None:
    summary = _parse(_record(1).replace('"step": 1', f'"step": {json.dumps(step)}') + _record(7))
    assert [s.step for s in summary.steps] == [7]
    assert summary.notes == ("1 damaged records were left out",)


def test_records_win_over_the_rounded_lines() -> None:
    summary = _parse(_time(9.99, 9.9) + _iteration(1, 9.0) + _record(1, 5.0))
    assert [(s.step, s.step_time_s, s.loss) for s in summary.steps] == [(1, 1.5, 5.0)]
    assert summary.source == "records"


def test_records_come_in_order_of_their_steps() -> None:
    assert [s.step for s in _parse(_record(3) + _record(1) + _record(2)).steps] == [1, 2, 3]


def test_a_step_that_is_logged_twice_counts_once_and_is_noted() -> None:
    summary = _parse(_record(1, 9.0) + _record(2) + _record(1, 5.0))
    assert [(s.step, s.loss) for s in summary.steps] == [(1, 5.0), (2, 5.0)]
    assert summary.notes == ("1 steps were logged more than once; the last of each counts",)


@every(
    ("loss", "read"),
    [*((text, text) for text in ("nan", "inf", "-inf")), *((bad, "None") for bad in (None, True, "abc", [1], {}))],
)
def test_a_loss_that_is_no_number_stays_visible_and_a_missing_one_is_none(loss: Any, read: str) -> None:
    (step,) = _parse(_record(1, loss)).steps
    assert str(step.loss) == read


@every(
    "line",
    [
        _record(1)[:-12] + "\n",  # cut in half
        _record(1)[:20] + "\n",
        _record(1).rstrip("\n") + _record(2),  # two on one line
        _record("1"),
        _record(None),
        _record(1, time_s=None),
        _record(1, time_s=0),
        _record(1, time_s=-1.0),
        _record(1, time_s="nan"),
        'MBRIDGE_STEP {"step": 1, "step_time_s": 1.0}\n',
        'MBRIDGE_STEP {"step": 1, "step_time_s": 1.0, "losses": [5.0]}\n',
    ],
)
def test_a_damaged_record_is_no_step_and_is_noted(line: str) -> None:
    summary = _parse(line)
    assert summary.steps == ()
    assert summary.source == "none"
    assert summary.notes == ("1 damaged records were left out",)


def test_a_record_cut_by_another_ranks_line_is_lost_and_the_others_stay() -> None:
    cut = _record(2)
    summary = _parse(_record(1) + cut[:30] + "W0102 warning from rank 1\n" + cut[30:] + _record(3))
    assert [s.step for s in summary.steps] == [1, 3]


@every("line", ["export MBRIDGE_PYTHON=/usr/bin/python3\n", "+ MBRIDGE_STEP_DIR=x\n", "MBRIDGE_STEPS: 10\n"])
def test_a_line_that_only_mentions_us_is_no_damaged_record(line: str) -> None:
    assert _parse(line).notes == ()


def test_a_step_time_line_that_mentions_us_is_read() -> None:
    summary = _parse("[MBRIDGE_NODE_0] " + _time() + _iteration(1))
    assert [s.step_time_s for s in summary.steps] == [1.5]


@every(
    "line",
    [
        'MBRIDGE_STEP {"step": 1, "step_time_s": ' + "9" * 400 + ', "losses": {}}\n',
        'MBRIDGE_STEP {"step": 1, "step_time_s": 1.0, "tflops_per_gpu": ' + "9" * 400 + ', "losses": {}}\n',
        "MBRIDGE_STEP " + "[" * 100_000 + "\n",
        "MBRIDGE_RUN " + '{"a":' * 100_000 + "\n",
        _iteration(1).replace("nan iterations:   0", "nan iterations: nan"),
        _iteration(1).replace("skipped iterations:   0", "skipped iterations: inf"),
        f"iteration {'1' * 5000}/ 9 | lm loss: 1.0 |\n",
        "Step Time : " + "9" * 5000 + "s GPU utilization: 1TFLOP/s/GPU\n",
    ],
)
def test_a_hostile_line_does_not_stop_the_reader(line: str) -> None:
    """Whatever a log holds, the lines after it are read."""
    assert 7 in [s.step for s in _parse(line + _record(7)).steps]


@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([_record(1).encode(), _iteration(2).encode()]))))
@settings(max_examples=100, deadline=None, database=None)
def test_no_bytes_stop_the_reader(pieces: list[bytes]) -> None:
    summary = _parse(b"".join(pieces) + b"\n" + _record(77).encode())
    assert summary.steps[-1].step == 77


def test_carriage_returns_at_the_ends_of_lines() -> None:
    text = _time() + _iteration(1) + _time() + _iteration(2)
    assert _parse(text.replace("\n", "\r\n")) == _parse(text)
    assert _parse(_record(1).replace("\n", "\r\n")) == _parse(_record(1))


@every(("before", "after"), [(b"\x00" * 4096, b""), (b"\xff\xfe rank 0\n", b"\x80\n"), (b"", b"MBRIDGE_")])
def test_bytes_around_a_record(before: bytes, after: bytes) -> None:
    summary = _parse(before + b'MBRIDGE_RUN {"version": 1}\n' + _record(1).encode() + after)
    assert ([step.step for step in summary.steps], summary.run) == ([1], {"version": 1})


def test_the_last_line_may_lack_its_end() -> None:
    assert [s.step for s in _parse((_record(1) + _record(2)).rstrip("\n")).steps] == [1, 2]


def test_a_summary_may_be_taken_while_the_log_grows() -> None:
    parser = LogParser()
    record = _record(2).encode()
    parser.feed(_record(1).encode() + record[:20])
    assert [s.step for s in parser.summary().steps] == [1]
    parser.feed(record[20:])
    assert [s.step for s in parser.summary().steps] == [1, 2]
    assert parser.summary().notes == ()


def test_the_same_summary_wherever_a_chunk_ends() -> None:
    whole = _parse(MIXED)
    assert [s.step for s in whole.steps] == [1, 2]
    for cut in range(len(MIXED) + 1):
        parser = LogParser()
        parser.feed(MIXED[:cut])
        parser.feed(MIXED[cut:])
        assert parser.finish() == whole, cut
    for size in (1, 2, 7, 40):
        parser = LogParser()
        for start in range(0, len(MIXED), size):
            parser.feed(MIXED[start : start + size])
        assert parser.finish() == whole, size


# Upstream's logs: two lines per step, printed by two ranks


@every("prefix", ["", "0: ", "15: "])
@every("time_first", [True, False])
def test_the_two_lines_in_either_order(prefix: str, time_first: bool) -> None:
    text = ""
    for step in (1, 2, 3):
        pair = [_time(step, 10 * step), _iteration(step, 7.0 - step)]
        text += "".join(prefix + line for line in (pair if time_first else reversed(pair)))
    summary = _parse(text)
    assert summary.source == "lines"
    assert summary.notes == ()
    assert [(s.step, s.step_time_s, s.tflops_per_gpu, s.loss, s.grad_norm) for s in summary.steps] == [
        (step, float(step), 10.0 * step, 7.0 - step, 0.5) for step in (1, 2, 3)
    ]


def test_the_two_lines_of_ranks_that_drift_apart() -> None:
    text = _time(1) + _time(2) + _iteration(1, 5.0) + _time(3) + _iteration(2, 4.0) + _iteration(3, 3.0)
    assert [(s.step, s.step_time_s, s.loss) for s in _parse(text).steps] == [(1, 1, 5.0), (2, 2, 4.0), (3, 3, 3.0)]


def test_upstreams_nan_is_seen_although_it_is_not_printed() -> None:
    first, second = _parse(_time() + _iteration(1) + _time() + _iteration(2, None, nan_iterations=1)).steps
    assert first.loss == 5.0
    assert second.loss is not None
    assert math.isnan(second.loss)


def test_step_times_alone_have_no_losses() -> None:
    summary = _parse(_time(1) + _time(2))
    assert [(s.step, s.loss) for s in summary.steps] == [(1, None), (2, None)]


def test_a_line_that_is_missing_is_noted() -> None:
    summary = _parse(_time() + _iteration(1) + _time())
    assert summary.notes == ("2 step-time lines for 1 iteration lines",)
    assert [s.loss for s in summary.steps] == [5.0, None]


def test_iteration_lines_alone_are_no_measurement() -> None:
    summary = _parse(_iteration(1) + _iteration(2))
    assert (summary.steps, summary.source) == ((), "none")


def test_upstream_steps_that_are_logged_twice_count_once_and_are_noted() -> None:
    """A job that was requeued starts again: its first steps are in the log twice."""
    text = "".join(_time(9) + _iteration(step, 9.0) for step in (1, 2))
    text += "".join(_time(1) + _iteration(step, 5.0) for step in (1, 2, 3))
    summary = _parse(text)
    assert [(s.step, s.step_time_s, s.loss) for s in summary.steps] == [(1, 1, 5.0), (2, 1, 5.0), (3, 1, 5.0)]
    assert "more than once" in " ".join(summary.notes)


# Files


def test_a_log_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "stdout.txt"
    path.write_bytes(MIXED)
    assert read_log(path) == _parse(MIXED)


def test_a_log_that_is_longer_than_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "stdout.txt"
    path.write_text("".join(_record(step) + "x" * 6000 + "\n" for step in range(1, 401)))
    assert path.stat().st_size > 1 << 21
    assert [s.step for s in read_log(path).steps] == list(range(1, 401))


def test_a_log_that_is_missing_empty_or_unreadable(tmp_path: Path) -> None:
    summary = read_log(tmp_path / "stdout.txt")
    assert (summary.steps, summary.notes) == ((), ("stdout.txt does not exist",))
    (tmp_path / "stdout.txt").touch()
    assert read_log(tmp_path / "stdout.txt") == LogSummary()
    (note,) = read_log(tmp_path).notes
    assert "cannot be read" in note


RUN = 'MBRIDGE_RUN {"version": 1, "world_size": 2}\n'


def test_a_run_record_without_a_version_is_not_ours() -> None:
    summary = _parse(RUN + _record(1) + 'MBRIDGE_RUN {"a": 1}\n' + _record(2))
    assert (summary.run["world_size"], summary.notes) == (2, ())


def test_a_run_that_was_started_again_is_noted() -> None:
    assert _parse(RUN + RUN + _record(1) + _record(2) + RUN).notes == ()
    assert _parse(RUN + _record(1) + RUN + _record(2) + _record(3)).notes == ("the run started again at step 2",)
    assert len(_parse("".join(RUN + _record(step) for step in range(1, 100))).notes) == 11


def test_a_record_that_is_nested_too_deep_is_damaged() -> None:
    deep = 'MBRIDGE_RUN {"version": 1, "x": ' + "[" * 600 + "]" * 600 + "}\n"
    assert _parse(deep + RUN + _record(1)).notes == ("1 damaged records were left out",)


def test_a_log_that_has_ended_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner judges by it, and then the report reads it, for a page again and again."""
    parsed: list[LogSummary] = []
    finish = LogParser.finish

    def counted(self: LogParser) -> LogSummary:
        parsed.append(finish(self))
        return parsed[-1]

    monkeypatch.setattr(LogParser, "finish", counted)
    path = tmp_path / "stdout.txt"
    path.write_bytes(MIXED)
    monkeypatch.setattr(parser, "_TICK_NS", -(10**18))  # as long after the end of the job as it takes
    assert read_log(path) == read_log(path) == _parse(MIXED)
    read_log(path, has_records=False)
    assert len(parsed) == 3, "once for each way of reading, and once here"
    path.write_bytes(MIXED + MIXED)
    assert read_log(path) == _parse(MIXED + MIXED)


def test_a_log_that_has_just_changed_is_read_again(tmp_path: Path) -> None:
    """Two changes within a tick of the file system's clock have the same time, and may have the same size."""
    path = tmp_path / "stdout.txt"
    for text in (MIXED, MIXED.swapcase(), MIXED):
        path.write_bytes(text)
        assert read_log(path) == _parse(text)


def test_noise_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for bytes costs a tenth of decoding and matching."""
    read: list[str] = []
    take = LogParser._take
    monkeypatch.setattr(LogParser, "_take", lambda self, line: (read.append(line), take(self, line))[1])
    told = (
        b"Step Time : 1.00s GPU utilization: 2.0MODEL_TFLOP/s/GPU",
        b"\x1b[1mStep\x1b[0m Time : 1.00s GPU utilization: 2.0MODEL_TFLOP/s/GPU",
        b"  5%|x| 1/9\rSTEP TIME : 1.00s GPU utilization: 2.0MODEL_TFLOP/s/GPU",
    )
    log = LogParser()
    log.feed(b"".join(b"INFO loading shard %d of 900\n\xff noise\n" % i + line + b"\n" for i, line in enumerate(told)))
    assert not any("noise" in line or "INFO" in line for line in read)
    assert log.num_steps == 3
