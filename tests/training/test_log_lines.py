"""The lines that a run prints, character by character."""

import json
import math
import re
from datetime import datetime
from typing import Any

import pytest

from cloudai_mbridge.training.process.log_lines import (
    RUN_MARK,
    STEP_MARK,
    StepReport,
    render_iteration,
    render_record,
    render_step_record,
    render_step_time,
    write_line,
)
from tests.cases import every

NOW = datetime(2026, 1, 2, 3, 4, 5)
STEP_TIME = re.compile(r"^Step Time : \d+\.\d{2}s GPU utilization: \d+\.\dMODEL_TFLOP/s/GPU$")
ORDER = [
    "consumed samples",
    "elapsed time per iteration (ms)",
    "throughput per GPU (TFLOP/s/GPU)",
    "learning rate",
    "global batch size",
    "lm loss",
    "mtp_1 loss",
    "loss scale",
    "grad norm",
    "num zeros",
    "number of skipped iterations",
    "number of nan iterations",
]


def _step(**keys: Any) -> StepReport:
    data: dict[str, Any] = {
        "step": 7,
        "train_iters": 50,
        "step_time_s": 1.23456,
        "tflops_per_gpu": 917.44,
        "consumed_samples": 56,
        "global_batch_size": 8,
        "learning_rate": 3e-4,
        "loss_scale": 1.0,
        "losses": {"lm loss": 10.85217, "mtp_1 loss": 0.5},
        "grad_norm": 2.3456,
        "num_zeros": 3,
        "skipped_iterations": 1,
        "nan_iterations": 2,
    }
    return StepReport(**{**data, **keys})


def test_the_step_time_line() -> None:
    assert render_step_time(_step()) == "Step Time : 1.23s GPU utilization: 917.4MODEL_TFLOP/s/GPU"


@every(("seconds", "tflops"), [(0.0, 0.0), (1e-9, 1e-9), (0.005, 0.05), (1e6, 1e6), (12.3, 917.4)])
def test_the_step_time_line_keeps_its_form(seconds: float, tflops: float) -> None:
    assert STEP_TIME.match(render_step_time(_step(step_time_s=seconds, tflops_per_gpu=tflops)))


def test_the_iteration_line() -> None:
    assert render_iteration(_step(), NOW) == (
        " [2026-01-02 03:04:05] iteration        7/      50 | consumed samples:           56 |"
        " elapsed time per iteration (ms): 1234.6 | throughput per GPU (TFLOP/s/GPU): 917.4 |"
        " learning rate: 3.000000E-04 | global batch size:     8 | lm loss: 1.085217E+01 | mtp_1 loss: 5.000000E-01 |"
        " loss scale: 1.0 | grad norm: 2.346 | num zeros: 3 | number of skipped iterations:   1 |"
        " number of nan iterations:   2 |"
    )


def test_the_order_of_the_fields() -> None:
    line = render_iteration(_step(), NOW)
    assert line.endswith(" |")
    assert [field.split(":")[0].strip() for field in line.split("|")[1:-1]] == ORDER


@every(
    ("change", "absent"),
    [
        ({"learning_rate": None}, "learning rate"),
        ({"grad_norm": None}, "grad norm"),
        ({"num_zeros": None}, "num zeros"),
        ({"losses": {"lm loss": math.nan, "mtp_1 loss": 0.5}}, "lm loss"),
        ({"losses": {"lm loss": -0.5, "mtp_1 loss": 0.5}}, "lm loss"),
    ],
)
def test_a_field_without_a_value_is_left_out(change: dict[str, Any], absent: str) -> None:
    names = [field.split(":")[0].strip() for field in render_iteration(_step(**change), NOW).split("|")[1:-1]]
    assert names == [name for name in ORDER if name != absent]


def test_every_field_in_its_place() -> None:
    every = {
        **{"skipped_samples": 16, "energy_per_gpu_j": 812.34, "power_per_gpu_w": 640.25},
        **{"params_norm": 25.3714, "max_attention_logit": 12.3456},
    }
    line = render_iteration(_step(**every), NOW)
    assert line == (
        " [2026-01-02 03:04:05] iteration        7/      50 | consumed samples:           56 |"
        " skipped samples:           16 | elapsed time per iteration (ms): 1234.6 |"
        " throughput per GPU (TFLOP/s/GPU): 917.4 | energy per GPU (J/iter/GPU): 812.3 | power per GPU (W/GPU): 640.2 |"
        " learning rate: 3.000000E-04 | global batch size:     8 | lm loss: 1.085217E+01 | mtp_1 loss: 5.000000E-01 |"
        " loss scale: 1.0 | grad norm: 2.346 | num zeros: 3 | params norm: 25.371 | max attention logit: 12.346 |"
        " number of skipped iterations:   1 | number of nan iterations:   2 |"
    )


@every(("tflops", "is_wanted", "is_there"), [(9.0, True, True), (9.0, False, False), (None, True, False)])
def test_the_throughput_where_wanted_and_known(tflops: float | None, is_wanted: bool, is_there: bool) -> None:
    line = render_iteration(_step(tflops_per_gpu=tflops), NOW, with_throughput=is_wanted)
    assert ("throughput per GPU" in line) == is_there


def test_a_loss_of_zero_is_a_loss() -> None:
    assert " lm loss: 0.000000E+00 |" in render_iteration(_step(losses={"lm loss": 0.0}), NOW)


def test_big_numbers_widen_their_fields() -> None:
    line = render_iteration(_step(step=123456789, train_iters=987654321, consumed_samples=10**13), NOW)
    assert " iteration 123456789/987654321 | consumed samples: 10000000000000 |" in line


def test_a_record_has_every_value_at_full_precision() -> None:
    line = render_step_record(_step(step_time_s=1 / 3, losses={"lm loss": math.pi}))
    mark, _, text = line.partition(" ")
    assert mark == STEP_MARK
    assert "\n" not in line
    record = json.loads(text)
    assert (record["version"], record["step"], record["step_time_s"]) == (1, 7, 1 / 3)
    assert record["losses"] == {"lm loss": math.pi}
    assert set(record) == {"version", *StepReport.__dataclass_fields__}


def test_a_record_is_strict_json() -> None:
    losses = {"a": math.nan, "b": math.inf, "c": -math.inf}
    line = render_step_record(_step(losses=losses, grad_norm=math.nan))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(line.partition(" ")[2], parse_constant=refuse)
    assert record["losses"] == {"a": "nan", "b": "inf", "c": "-inf"}
    assert record["grad_norm"] == "nan"


def test_a_record_stays_on_one_line() -> None:
    line = render_record(RUN_MARK, {"device": "a\nb\u2028c", "deep": {"x": math.inf}})
    assert line.startswith(f"{RUN_MARK} ")
    assert len(line.splitlines()) == 1
    assert json.loads(line.partition(" ")[2]) == {"version": 1, "device": "a\nb\u2028c", "deep": {"x": "inf"}}


def test_numbers_in_lists_too() -> None:
    assert json.loads(render_record(RUN_MARK, {"x": [math.nan, 1.0]}).partition(" ")[2])["x"] == ["nan", 1.0]


def test_a_line_is_one_write(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    written: list[str] = []
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or write(text))
    write_line("x y")
    assert written == ["x y\n"]
    assert capsys.readouterr().out == "x y\n"
