"""The two lines of Megatron-Bridge and our records: what is read, and what is not."""

import time
from datetime import datetime

from cloudai_mbridge.logs.parser import match_iteration, match_record, match_step_time
from cloudai_mbridge.training.process.log_lines import (
    RUN_MARK,
    STEP_MARK,
    StepReport,
    render_iteration,
    render_record,
    render_step_record,
    render_step_time,
)
from tests.cases import every


@every(
    ("line", "expected"),
    [
        ("Step Time : 12.30s GPU utilization: 917.4MODEL_TFLOP/s/GPU", (12.3, 917.4)),
        ("Step Time : 12.30s GPU utilization: 917.4TFLOP/s/GPU", (12.3, 917.4)),  # older releases
        ("0: Step Time : 1.00s GPU utilization: 2.0MODEL_TFLOP/s/GPU", (1.0, 2.0)),
        ("step time: 1 s, whatever GPU UTILIZATION:  2  model_tflop/S/gpu and more", (1.0, 2.0)),
        ("Step Time:1sGPU utilization:2TFLOP/s/GPU", (1.0, 2.0)),
        ("Step Time\t:\t1.5\ts GPU utilization:\t2.5\tTFLOP/s/GPU", (1.5, 2.5)),
        # two records on one line are one pair
        (
            "Step Time : 1.00s GPU utilization: 2.0TFLOP/s/GPU Step Time : 3.00s GPU utilization: 4.0TFLOP/s/GPU",
            (1.0, 2.0),
        ),
        # the reference's lazy gap joins a torn first record with the second one's rate
        ("Step Time : 1.00s GPU utilStep Time : 3.00s GPU utilization: 4.0TFLOP/s/GPU", (1.0, 4.0)),
        # and, letter case being ignored, takes the S of the next record for the unit of a torn one
        ("Step Time : 12Step Time : 3.00s GPU utilization: 4.0TFLOP/s/GPU", (12.0, 4.0)),
        # what the reference does not read
        ("Step Time : 1.5e3s GPU utilization: 2.0TFLOP/s/GPU", None),
        ("Step Time : -1.0s GPU utilization: 2.0TFLOP/s/GPU", None),
        ("Step Time : 1,234s GPU utilization: 2.0TFLOP/s/GPU", None),
        ("Step Time : .5s GPU utilization: 2.0TFLOP/s/GPU", None),
        ("Step Time : 1.s GPU utilization: 2.0TFLOP/s/GPU", None),
        ("Step Time : nans GPU utilization: nanMODEL_TFLOP/s/GPU", None),
        ("Step Time : 1.0s GPU utilization: nanMODEL_TFLOP/s/GPU", None),
        ("Step Time : 1.0s GPU utilization: -2.0TFLOP/s/GPU", None),
        ("Step Time : 1.00s GPU utilization: 2.0MODEL_", None),
        ("StepTime : 1.0s GPU utilization: 2.0TFLOP/s/GPU", None),
        ("", None),
    ],
)
def test_the_step_time_line(line: str, expected: tuple[float, float] | None) -> None:
    assert match_step_time(line) == expected


UPSTREAM = (
    " [2026-01-02 03:04:05] iteration        7/      50 | consumed samples:           56 | elapsed time per iteration"
    " (ms): 1234.5 | learning rate: 3.000000E-04 | global batch size:     8 | lm loss: 1.085217E+01 | loss scale: 1.0 |"
    " grad norm: 2.345 | number of skipped iterations:   1 | number of nan iterations:   2 |"
)


def test_the_iteration_line() -> None:
    assert match_iteration(UPSTREAM) == {
        "step": 7,
        "train_iters": 50,
        "step_time_s": 1.2345,
        "tflops_per_gpu": None,
        "loss": 10.85217,
        "grad_norm": 2.345,
        "nan_iterations": 2,
        "skipped_iterations": 1,
    }


@every("prefix", ["0: ", "7: [rank7] ", "node-1 | ", "\x00\x00"])
def test_the_iteration_line_behind_a_prefix(prefix: str) -> None:
    assert match_iteration(prefix + UPSTREAM) == match_iteration(UPSTREAM)


def test_a_loss_that_is_not_printed_is_none() -> None:
    fields = match_iteration(UPSTREAM.replace(" lm loss: 1.085217E+01 |", ""))
    assert fields is not None
    assert fields["loss"] is None
    assert fields["step"] == 7


@every(("text", "expected"), [("INF", float("inf")), ("-1.0E+00", -1.0), ("abc", None), ("", None)])
def test_odd_losses(text: str, expected: float | None) -> None:
    fields = match_iteration(UPSTREAM.replace("1.085217E+01", text))
    assert fields is not None
    assert fields["loss"] == expected


@every(
    "line",
    [
        " validation loss at iteration 10 | lm loss value: 1.0E+01 | lm loss PPL: 2.0E+04 |",
        " [after training is done] datetime: 2026-01-02 03:04:05 ",
        "iteration 7 of 50 |",
        "iteration 7/ 50",
        "myiteration 7/ 50 |",
        "",
    ],
)
def test_what_is_no_iteration_line(line: str) -> None:
    assert match_iteration(line) is None


@every("filling", [" ", "a", ": ", "a:", "| "])
def test_a_strange_line_costs_no_time(filling: str) -> None:
    """A log is not ours to trust: no line of it may make the report wait for minutes."""
    started = time.process_time()
    match_iteration("iteration 1/ 2 |" + filling * 1000)
    assert time.process_time() - started < 0.25


def test_our_own_lines_are_read_back() -> None:
    report = StepReport(
        step=3,
        train_iters=10,
        step_time_s=1.2345678901234567,
        tflops_per_gpu=0.04321098765432101,
        consumed_samples=24,
        global_batch_size=8,
        learning_rate=0.0003,
        loss_scale=1.0,
        losses={"lm loss": 6.123456789012345},
        grad_norm=1.5,
        num_zeros=None,
        skipped_iterations=0,
        nan_iterations=0,
    )
    assert match_step_time(render_step_time(report)) == (1.23, 0.0)
    fields = match_iteration(render_iteration(report, datetime(2026, 1, 2)))
    assert fields is not None
    assert (fields["step"], fields["train_iters"], fields["loss"], fields["grad_norm"]) == (3, 10, 6.123457, 1.5)
    record = match_record(render_step_record(report), STEP_MARK)
    assert record is not None
    assert record["step_time_s"] == report.step_time_s
    assert record["tflops_per_gpu"] == report.tflops_per_gpu
    assert record["losses"] == report.losses


def test_a_record_is_found_behind_a_prefix() -> None:
    line = "1: \x00" + render_record(RUN_MARK, {"world_size": 2}) + "\r"
    assert match_record(line, RUN_MARK) == {"version": 1, "world_size": 2}
    assert match_record(line, STEP_MARK) is None


@every("text", ['X {"a": 1', "X [1]", "X 1", "X", 'X{"a": 1}', 'X {"a": 1}X {"a": 1}', 'Y {"a": 1}'])
def test_what_is_no_record(text: str) -> None:
    assert match_record(text, "X") is None


@every(("depth", "is_record"), [(2, True), (20, True), (21, False), (900, False), (100_000, False)])
def test_how_deep_a_record_may_be(depth: int, is_record: bool) -> None:
    text = 'X {"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    assert (match_record(text, "X") is not None) is is_record
    assert match_record('X {"a": "' + "[" * depth + '"}', "X") is not None
