"""Steps that cannot have been measured."""

from typing import Any

import pytest

from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import implausible, measure, missing_steps


def _steps(*numbers: int, **values: Any) -> list[StepRecord]:
    known: dict[str, Any] = {"step_time_s": 0.5, "tflops_per_gpu": 400.0, "loss": 5.0, **values}
    return [StepRecord(step=number, **known) for number in numbers]


def test_ordinary_steps_are_plausible() -> None:
    assert implausible(_steps(1, 2, 3, peak_memory_gib=70.0, grad_norm=0.0), 3) == []
    assert implausible(_steps(1, step_time_s=None, tflops_per_gpu=None), 1) == []
    assert implausible(_steps(1, 2), None) == []


@pytest.mark.parametrize("number", [0, 4, 10**14])
def test_a_step_that_was_not_asked_for(number: int) -> None:
    (reason,) = implausible(_steps(*sorted((1, 2, 3, number))), 3)
    assert reason == f"step {number} is in the log; steps 1 to 3 were configured"


@pytest.mark.parametrize(
    ("name", "last_good", "bad"),
    [
        ("step_time_s", 1e-6, 9e-7),
        ("step_time_s", 30 * 86400.0, 30 * 86401.0),
        ("step_time_s", 0.5, 5e-324),
        ("step_time_s", 0.5, -1.0),
        ("tflops_per_gpu", 1e-9, -5.0),
        ("tflops_per_gpu", 9999.0, 1e6),
        ("peak_memory_gib", 1e-3, -1.0),
        ("peak_memory_gib", 2.0**20, 2.0**21),
        ("grad_norm", 0.0, -1e-3),
    ],
)
def test_bounds(name: str, last_good: float, bad: float) -> None:
    assert implausible(_steps(1, **{name: last_good}), 1) == []
    (reason,) = implausible(_steps(1, **{name: bad}), 1)
    assert reason.startswith(f"step 1: {name} = {bad:g}")


@pytest.mark.parametrize(
    ("device", "last_good", "bad"),
    [("NVIDIA H100 80GB HBM3", 3957.0, 3959.0), ("AMD EPYC", 9999.0, 1e6), (None, 9999.0, 1e6), (7, 9999.0, 1e6)],
)
def test_a_rate_is_bounded_by_the_peak_of_the_device(device: Any, last_good: float, bad: float) -> None:
    assert implausible(_steps(1, tflops_per_gpu=last_good), 1, device) == []
    assert implausible(_steps(1, tflops_per_gpu=bad), 1, device) != []


def test_steps_beyond_those_asked_for_are_in_no_statistic() -> None:
    metrics = measure(_steps(1, 2, 3) + _steps(4, 5, step_time_s=99.0), 1, None, num_steps=3)
    assert metrics.step_time_s is not None
    assert (metrics.window, metrics.step_time_s.n, metrics.step_time_s.max) == ((2, 3), 2, 0.5)


def test_a_time_that_rounds_to_zero_is_not_measured() -> None:
    assert measure(_steps(1, 2, step_time_s=0.0), 0, None).step_time_s is None


def test_missing_steps_cost_what_is_there_and_not_what_was_asked_for() -> None:
    assert missing_steps(_steps(1, 2, 4), 10**15) == [f"3 of {10**15} steps are in the log; the first missing is 3"]
    assert missing_steps(_steps(1, 2), 2) == []
    assert missing_steps([], 0) == []
