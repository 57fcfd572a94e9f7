"""Statistics over a window: the right steps, the right numbers, and nothing that stands for a missing value."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.logs import StepRecord
from cloudai_mbridge.metrics import measure, over_runs, summarize
from tests.cases import every


def _steps(*times: float | None, first: int = 1) -> list[StepRecord]:
    return [StepRecord(i, t, None if t is None else 10 / t, 5.0 - i) for i, t in enumerate(times, first)]


def test_the_warm_up_is_left_out() -> None:
    metrics = measure(_steps(100.0, 100.0, 1.0, 2.0, 6.0), 2, 120.0)
    assert (metrics.warmup_steps, metrics.window) == (2, (3, 5))
    assert metrics.step_time_s is not None
    assert (metrics.step_time_s.n, metrics.step_time_s.mean, metrics.step_time_s.median) == (3, 3.0, 2.0)
    assert (metrics.step_time_s.min, metrics.step_time_s.max) == (1.0, 6.0)
    assert metrics.step_time_s.std == pytest.approx(math.sqrt(14 / 3))  # of the population
    assert metrics.tflops_per_gpu is not None
    assert metrics.tflops_per_gpu.mean == pytest.approx((10 + 5 + 10 / 6) / 3)
    assert metrics.tokens_per_s_per_gpu is not None
    assert metrics.tokens_per_s_per_gpu.mean == pytest.approx((120 + 60 + 20) / 3)


def test_a_capture_in_the_window_does_not_decide() -> None:
    """A CUDA graph is captured at the second step counted; without graphs, steps take a third longer."""
    fast = measure(_steps(9.0, 60.0, 4.0, 14.0, 3.02, 3.0, 3.0, 2.98, 3.0), 2, 120.0)
    slow = measure(_steps(*[4.0] * 9), 2, 120.0)
    assert fast.step_time_s is not None
    assert slow.step_time_s is not None
    assert fast.step_time_s.mean > slow.step_time_s.mean
    assert fast.step_time_s.capped_mean == pytest.approx((3.3 + 3.3 + 3.02 + 3.0 + 3.0 + 2.98 + 3.0) / 7)
    assert fast.step_time_s.capped_std < 0.2
    assert fast.tokens_per_s_per_gpu is not None
    assert fast.tflops_per_gpu is not None
    assert fast.tokens_per_s_per_gpu.capped_mean == pytest.approx(120 / fast.step_time_s.capped_mean)
    assert fast.tflops_per_gpu.capped_mean == pytest.approx(10 / fast.step_time_s.capped_mean)


def test_over_runs_the_capped_means_count() -> None:
    one, other = (measure(_steps(*times), 0, None).step_time_s for times in ((1.0, 1.0, 1.0, 9.0), (1.2,) * 4))
    found = over_runs([one, other])
    assert found is not None
    assert (found.n, found.mean, found.capped_mean) == (2, pytest.approx(2.1), pytest.approx((1.025 + 1.2) / 2))
    assert over_runs([one]) is one
    assert over_runs([one, None]) is None


def test_zero_is_not_measured() -> None:
    steps = [StepRecord(step, 1.0, 0.0, 5.0, None, 0.0) for step in (1, 2, 3)]
    metrics = measure(steps, 0, None)
    assert (metrics.tflops_per_gpu, metrics.peak_memory_gib) == (None, None)
    assert measure([StepRecord(1, 0.0, 1.0, 5.0)], 0, None).step_time_s is None


def test_losses_are_of_the_whole_run() -> None:
    metrics = measure(_steps(1.0, 1.0, 1.0), 2, None)
    assert (metrics.first_loss, metrics.last_loss) == (4.0, 2.0)


@every(
    "times, first, warmup, window, n, mean",
    [
        ((9.0, 1.0, 1.0), 3, 3, (4, 5), 2, 1.0),  # a log that begins at step 3 has no 3 steps of its own to leave out
        ((1.0, 3.0), 1, 0, (1, 2), 2, 2.0),
        ((1.0, 2.0), 1, 1, (2, 2), 1, 2.0),
    ],
)
def test_the_warm_up_goes_by_the_number_of_the_step(
    times: tuple[float, ...], first: int, warmup: int, window: tuple[int, int], n: int, mean: float
) -> None:
    metrics = measure(_steps(*times, first=first), warmup, None)
    assert metrics.window == window
    assert metrics.step_time_s is not None
    assert (metrics.step_time_s.n, metrics.step_time_s.mean) == (n, mean)
    assert (metrics.step_time_s.std == 0.0) == (n == 1 or len(set(times[-n:])) == 1)


@every("times", [(), (1.0,), (1.0, 2.0, 3.0), (1.0, 1.0, 1.0, None, 3.0)])
def test_without_the_times_of_all_steps_counted_there_is_nothing(times: tuple[float | None, ...]) -> None:
    metrics = measure(_steps(*times), 3, 100.0)
    assert (metrics.window is None) == (len(times) <= 3)
    assert (metrics.step_time_s, metrics.tflops_per_gpu, metrics.tokens_per_s_per_gpu) == (None, None, None)


def test_one_missing_value_makes_the_statistic_missing() -> None:
    assert summarize([]) is None
    for position, missing in itertools.product(range(3), (None, math.nan, math.inf, -math.inf)):
        values: list[float | None] = [1.0, 2.0, 3.0]
        values[position] = missing
        assert summarize(values) is None, values


def test_a_missing_rate_leaves_the_step_time() -> None:
    for tokens in (None, 0.0):
        metrics = measure(_steps(1.0, 2.0), 0, tokens)
        assert (metrics.tokens_per_s_per_gpu, metrics.step_time_s is None) == (None, False)
    metrics = measure([StepRecord(1, 1.0, None, 5.0), StepRecord(2, 2.0, 3.0, 5.0)], 0, None)
    assert (metrics.tflops_per_gpu, metrics.step_time_s is None) == (None, False)


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None, database=None)
def test_statistics_agree_with_their_definitions(values: list[float]) -> None:
    s = summarize(values)
    assert s is not None
    assert s.n == len(values)
    assert s.min == min(values) <= s.median <= max(values) == s.max
    assert s.mean == pytest.approx(sum(values) / len(values))
    assert s.std == pytest.approx(statistics.pstdev(values))


@pytest.mark.parametrize("values", [[1e308, 1e308], [1e308, 1.0], [5e-324, 5e-324]])
def test_numbers_at_the_ends_of_the_range_are_no_crash(values: list[float]) -> None:
    """A damaged record may hold any number; the report must still be written."""
    s = summarize(values)
    assert s is None or math.isfinite(s.mean)


def _memory(*peaks: float | None) -> list[StepRecord]:
    return [StepRecord(i, 1.0, 1.0, 5.0, None, peak) for i, peak in enumerate(peaks, 1)]


def test_the_peak_memory_is_of_the_whole_run() -> None:
    """What the warm-up has taken has to fit, too."""
    metrics = measure(_memory(1.0, 4.0, 2.0), 2, None, memory_kind="resident set")
    assert (metrics.peak_memory_gib, metrics.memory_kind) == (4.0, "resident set")


@pytest.mark.parametrize("peaks", [(), (None, None), (1.0, None), (math.nan, 1.0)])
def test_memory_that_a_step_does_not_tell_is_unknown(peaks: tuple[float | None, ...]) -> None:
    metrics = measure(_memory(*peaks), 0, None, memory_kind="resident set")
    assert (metrics.peak_memory_gib, metrics.memory_kind) == (None, None)


def test_what_the_numbers_mean_stands_beside_them() -> None:
    metrics = measure(_steps(1.0), 0, 120.0, flops_per_step=2e9, flops_formula="formula/1")
    assert (metrics.flops_per_step, metrics.flops_formula, metrics.tokens_per_step_per_gpu) == (2e9, "formula/1", 120.0)
