"""A calibration: it finds a cluster's factors, few points help, and wrong ones do no harm."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import FACTORS, StepFactors
from cloudai_mbridge.tune.belief import ALL, log_times_of
from cloudai_mbridge.tune.calibrate import calibrate
from cloudai_mbridge.tune.measured import MeasuredPoint
from tests.golden import Sentence
from tests.tune.a_cluster import SLOW, measured_points, spoiled


def median_error(points: list[MeasuredPoint], factors: StepFactors) -> float:
    model = log_times_of([point.groups for point in points])
    logs = model(np.log([getattr(factors, name) for name in FACTORS]), ALL)[0]
    return float(np.median(np.abs(np.exp(logs) / [point.step_time_s for point in points] - 1)))


@pytest.fixture(scope="module")
def points() -> list[MeasuredPoint]:
    return measured_points("llama3_8b", SLOW)


@pytest.fixture(scope="module")
def others() -> list[MeasuredPoint]:
    return measured_points("llama3_70b", SLOW)


def test_many_points_tell_how_slow_a_cluster_is(points: list[MeasuredPoint], others: list[MeasuredPoint]) -> None:
    found = calibrate("h100", points)
    assert found.is_better
    assert found.points == len(points)
    assert found.held_out.calibrated < 0.03 < found.held_out.shipped
    assert median_error(others, found.step_time) < 0.06 < median_error(others, StepFactors())


@pytest.mark.parametrize("seed", range(5))
def test_ten_points_of_another_model_help(points: list[MeasuredPoint], others: list[MeasuredPoint], seed: int) -> None:
    chosen = random.Random(seed).sample(points, 10)
    found = calibrate("h100", chosen)
    assert median_error(others, found.step_time) < 0.5 * median_error(others, StepFactors())
    noise = [spoiled(point, by) for point, by in zip(chosen, (0.1, 8.0, 0.3, 20.0, 0.05), strict=False)]
    found = calibrate("h100", [*chosen, *noise])
    assert median_error(others, found.step_time) < 1.1 * median_error(others, StepFactors())


@pytest.mark.parametrize("seed", range(5))
def test_points_that_the_shipped_model_predicts_change_little(points: list[MeasuredPoint], seed: int) -> None:
    right = random.Random(seed).sample(measured_points("llama3_8b", {}, scatter=0.05), 6)
    found = calibrate("h100", right)
    assert median_error(points, found.step_time) < 1.1 * median_error(points, StepFactors())
    if not found.is_better:
        assert found.step_time == StepFactors()
        assert found.held_out.calibrated == found.held_out.shipped


@pytest.mark.parametrize("by", [1e-7, 1e7])
def test_times_in_another_unit_end_in_no_traceback(points: list[MeasuredPoint], by: float) -> None:
    found = calibrate("h100", [spoiled(replace(point, peak_over_predicted=by), by) for point in points])
    assert found.memory in (0.001, 1000.0)


def test_few_points_are_refused(points: list[MeasuredPoint], sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        calibrate("h100", points[:4])
    sentence(caught)


def test_memory_is_calibrated_by_its_median(points: list[MeasuredPoint]) -> None:
    peaks = [replace(point, peak_over_predicted=1.1 + 0.01 * (i % 3)) for i, point in enumerate(points)]
    found = calibrate("h100", [*peaks[:9], replace(peaks[9], peak_over_predicted=7.0)])
    assert found.memory_points == 10
    assert 1.09 < found.memory < 1.11
    assert calibrate("h100", [*peaks[:4], *points[4:]]).memory == 1.0
