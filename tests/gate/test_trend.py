"""The trend names the run where the level moved, and says nothing of series whose level did not."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloudai_mbridge.gate.history import History, NamedRun, Series, SeriesRun
from cloudai_mbridge.gate.levels import MIN_RUNS, find_levels
from cloudai_mbridge.gate.runs import METRICS
from cloudai_mbridge.gate.trend import (
    Effect,
    Trend,
    differences,
    effect_of,
    find_trend,
    headline,
    history_rows,
    story,
    summary,
)
from cloudai_mbridge.metrics import Direction
from tests.gate.history_data import ENVIRONMENT, START, make_point, write_report
from tests.golden import Sentence

PUBLISHED = (943.0, 597.0, 934.0)  # GPT-OSS 120B on GB200, TFLOP/s/GPU, of three releases
NOISE: Mapping[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(3, size=n),
    "autocorrelated": lambda rng, n: _autocorrelated(rng, n),
}


def _autocorrelated(rng: np.random.Generator, n: int) -> Any:
    shocks = rng.normal(size=n + 50)
    for i in range(1, len(shocks)):
        shocks[i] += 0.3 * shocks[i - 1]
    return shocks[50:]


def noisy(levels: Iterable[float], seed: int, noise: float = 0.01) -> list[float]:
    levels = np.asarray(list(levels))
    return list((levels * np.exp(noise * np.random.default_rng(seed).normal(size=len(levels)))).tolist())


def make_run(i: int, value: float | None = 1.0, facts: Mapping[str, Any] | None = None, **changes: Any) -> SeriesRun:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "nodes"}
    ended_at = (START + timedelta(days=i)).isoformat()
    run = NamedRun(f"run{i:04d}", "gpt/tp=1", ended_at, "a" * 40, ("n1", "n2"))
    return replace(run, **changes), environment if facts is None else facts, value


def make_series(
    runs: Sequence[SeriesRun], metric: str = "step_time_s", num_good: int | None = None, num_failed: int = 0
) -> Series:
    return Series("0123456789abcdef", metric, tuple(runs), len(runs) if num_good is None else num_good, num_failed)


def trend_of(values: Iterable[float], metric: str = "tflops_per_gpu", **options: Any) -> Trend:
    return find_trend(make_series([make_run(i, value) for i, value in enumerate(values)], metric), **options)


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("num_runs", [50, 200])
def test_a_constant_level_has_no_change(kind: str, num_runs: int) -> None:
    """At most 1 % of series is promised; of 200, more than 6 would be seen in 1 of 200 test runs at that rate."""
    rng = np.random.default_rng(num_runs)
    alarms = 0
    for _ in range(200):
        found = find_levels(np.exp(0.01 * NOISE[kind](rng, num_runs)).tolist())
        alarms += bool(found.steps or found.drift or found.departure)
    assert alarms <= 6


@pytest.mark.parametrize("seed", range(20))
def test_published_history_of_ten_nights_per_level(seed: int) -> None:
    trend = trend_of(noisy((level for level in PUBLISHED for _ in range(10)), seed))
    down, up = trend.changes
    assert (down.run.run_id, down.effect, down.back_before) == ("run0010", Effect.WORSE, "")
    assert (up.run.run_id, up.effect, up.back_before) == ("run0020", Effect.BETTER, "run0010")
    assert down.interval is not None
    assert down.interval[0] < 597 / 943 - 1 < down.interval[1]
    assert (down.earliest, down.latest) == ("run0010", "run0010")
    assert "back at the level of before run run0010" in "\n".join(text for text, _ in story(trend))


@pytest.mark.parametrize("seed", range(20))
def test_published_history_is_told_at_the_first_bad_night(seed: int) -> None:
    trend = trend_of(noisy([943.0] * 10 + [597.0], seed))
    (change,) = trend.changes
    assert (change.run.run_id, change.effect, change.is_level) == ("run0010", Effect.WORSE, False)
    assert "the last run departs from the level by -3" in story(trend)[0][0]
    assert "(1 run: not yet a level)" in story(trend)[0][0]


@pytest.mark.parametrize("seed", range(20))
def test_the_recovery_is_told_at_the_first_good_night(seed: int) -> None:
    trend = trend_of(noisy([943.0] * 10 + [597.0] * 10 + [934.0], seed))
    change = trend.changes[-1]
    assert (change.run.run_id, change.effect, change.back_before) == ("run0020", Effect.BETTER, "run0010")
    assert story(trend)[-3][0].endswith("; near the level of before run run0010")


@pytest.mark.parametrize("num_bad", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(5))
def test_and_at_every_later_night(seed: int, num_bad: int) -> None:
    trend = trend_of(noisy([943.0] * 10 + [597.0] * num_bad, seed))
    assert [change.run.run_id for change in trend.changes] == ["run0010"]


def test_published_history_of_three_values_needs_an_assumed_noise() -> None:
    unknown = trend_of(PUBLISHED)
    assert not unknown.is_changed
    assert unknown.unknown == f"3 runs are too few to tell a change from noise; {MIN_RUNS} are needed"
    for known, names in ((2, ["run0001"]), (3, ["run0001", "run0002"])):
        trend = trend_of(PUBLISHED[:known], assumed_noise=0.01)
        assert [change.run.run_id for change in trend.changes] == names
        assert "the noise is assumed, not measured" in trend.notes
    assert trend.changes[0].effect is Effect.WORSE
    assert trend.changes[1].back_before == "run0001"


def test_an_assumed_noise_gives_way_to_a_measured_one() -> None:
    values = noisy([1.0] * 30, 1)
    assert trend_of(values, assumed_noise=1e-6) == trend_of(values)


@pytest.mark.parametrize("size", [0.03, -0.03, 0.05])
def test_small_steps_are_found_near_their_place(size: float) -> None:
    """Of 3 % at 1 % noise between 30 and 30 runs, 95 of 100 are."""
    found = [find_levels(noisy([1.0] * 30 + [1.0 + size] * 30, seed)).steps for seed in range(100)]
    named = [steps[0] for steps in found if len(steps) == 1]
    assert len(named) >= 95
    assert sum(step.earliest <= 30 <= step.latest for step in named) >= 90
    assert sum(step.interval[0] <= size <= step.interval[1] for step in named) >= 85


def test_steps_below_the_least_effect_are_not_named() -> None:
    values = noisy([1.0] * 100 + [1.005] * 100, 3, noise=0.001)
    assert not find_levels(values).steps
    assert [step.index for step in find_levels(values, min_effect=0.002).steps] == [100]


def test_a_small_step_takes_no_large_one_with_it() -> None:
    values = noisy([1.0] * 20 + [1.05] * 20 + [1.055] * 20, 3, noise=0.0001)
    (step,) = find_levels(values).steps
    assert step.index == 20


def test_a_spike_is_no_level() -> None:
    values = noisy([1.0] * 60, 4)
    values[30] *= 1.5
    assert not find_levels(values).steps


def test_three_runs_are_a_level() -> None:
    found = find_levels(noisy([1.0] * 20 + [1.3] * 3 + [1.0] * 20, 5))
    assert [(step.index, step.back_to) for step in found.steps] == [(20, None), (23, 20)]


@pytest.mark.parametrize("seed", range(5))
def test_a_drift_is_a_drift_and_no_stairs(seed: int) -> None:
    values = noisy((1.0 + 0.0003 * i for i in range(200)), seed)
    trend = trend_of(values, "step_time_s")
    assert trend.drift is not None
    assert not trend.changes
    assert trend.drift.effect is Effect.WORSE
    assert trend.drift.per_100_runs == pytest.approx(0.03, rel=0.2)
    assert (
        f"worse: drifts by {100 * trend.drift.per_100_runs:+.2f} % per 100 runs since run run0000" in story(trend)[0][0]
    )
    assert "drifting" in headline(trend)


def test_a_drift_after_a_step() -> None:
    found = find_levels(noisy([1.3] * 40 + [1.0 + 0.0006 * i for i in range(120)], 6))
    assert [step.index for step in found.steps][:1] == [40]
    assert found.drift is not None
    assert found.drift[0] == 40


def test_a_step_is_no_drift() -> None:
    for seed in range(20):
        found = find_levels(noisy([1.0] * 50 + [1.03] * 50, seed))
        assert found.drift is None
        assert len(found.steps) == 1


def test_equal_values_with_and_without_a_step() -> None:
    constant = trend_of([2.0] * 20)
    assert not constant.is_changed
    assert "all 20 runs have the very same value: nothing is known of the noise" in constant.notes
    stepped = trend_of([2.0] * 10 + [3.0] * 10)
    assert [change.run.run_id for change in stepped.changes] == ["run0010"]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_values_without_a_relative_change(bad: float) -> None:
    assert find_levels([1.0] * 20 + [bad]).unknown == "values that are not positive have no relative change"


def test_runs_without_the_metric_and_shared_times_are_said(sentence: Sentence) -> None:
    runs = [make_run(i, 1.0 + 0.001 * (i % 3)) for i in range(12)]
    runs[3] = make_run(3, None)
    runs[5] = make_run(5, 1.0, ended_at=runs[4][0].ended_at)
    trend = find_trend(make_series(runs, num_good=20, num_failed=2))
    assert trend.notes == (
        "the last 12 runs were looked at, and 8 older ones were not; see --last",
        "2 failed runs in that time counted for nothing",
        "1 of 12 runs without a comparable step_time_s left out",
        "2 runs have identical times; they are in the order of their import",
    )
    missing = find_trend(make_series([(run, facts, None) for run, facts, _ in runs], "peak_memory_gib"))
    sentence(headline(missing))


def test_what_was_new_in_the_run_is_said() -> None:
    values = noisy([1.0] * 10 + [1.2] * 10, 8)
    runs = [make_run(i, value) for i, value in enumerate(values)]
    environment = {**ENVIRONMENT, "driver": None, "packages": {"torch": "2.8.0"}, "git": {"commit": "b" * 40}}
    del environment["nodes"]
    runs[10] = make_run(10, runs[10][2], environment, commit="b" * 40, nodes=("n2", "n9"))
    (change,) = find_trend(make_series(runs)).changes
    assert change.differences == (
        "driver 570.1 -> (unknown)",
        f"git.commit {'a' * 40} -> {'b' * 40}",
        "git.dirty False -> (unknown)",
        "packages.torch 2.7.0 -> 2.8.0",
        "nodes +n9 -n1",
    )
    assert (change.run.commit, change.run.nodes) == ("b" * 40, ("n2", "n9"))
    text = "\n".join(line for line, _ in story(find_trend(make_series(runs))))
    assert "new against the run before: driver 570.1 -> (unknown);" in text
    assert f"gpt/tp=1, commit {'b' * 12}, nodes n2, n9" in text


def test_the_page_has_what_the_command_says_of_a_change(tmp_path: Path) -> None:
    values = noisy([1.0] * 10 + [1.2] * 10, 8)
    points = [
        make_point(value, number=i, environment={"packages": {"torch": "2.8.0" if i >= 10 else "2.7.0"}})
        for i, value in enumerate(values)
    ]
    path = write_report(tmp_path / "report.json", points)
    with History(tmp_path / "history.sqlite") as store:
        store.import_report(path)
        rows = history_rows(store, json.loads(path.read_text()))
        (key,) = store.keys()
        told = [line for line, _ in story(find_trend(store.series(key, "step_time_s", 100)))]
    (change,) = (row for row in rows if row["is_change"])
    assert "new against the run before: packages.torch 2.7.0 -> 2.8.0" in change["about"]
    assert [change["words"], *change["about"]] == [line.strip() for line in told][: 1 + len(change["about"])]
    assert not any(row["about"] for row in rows if row is not change)


def test_nothing_new_is_said_as_well() -> None:
    trend = trend_of(noisy([1.0] * 10 + [1.2] * 10, 8))
    assert "its report differs in nothing" in "\n".join(line for line, _ in story(trend))


def test_many_nodes_are_cut() -> None:
    before = make_run(0, nodes=())
    after = make_run(1, nodes=tuple(f"n{i}" for i in range(9)))
    assert differences(before, after) == ("nodes +n0 +n1 +n2 +n3 +n4 +n5 and 3 more",)


@pytest.mark.parametrize(
    ("metric", "change", "effect"),
    [
        ("step_time_s", 0.1, Effect.WORSE),
        ("step_time_s", -0.1, Effect.BETTER),
        ("tflops_per_gpu", 0.1, Effect.BETTER),
        ("tflops_per_gpu", -0.1, Effect.WORSE),
        ("loss_curve", 0.1, Effect.CHANGED),
        ("loss_curve", -0.1, Effect.CHANGED),
    ],
)
def test_the_direction_of_the_metric_decides(metric: str, change: float, effect: Effect) -> None:
    assert effect_of(change, METRICS[metric].direction) is effect
    assert METRICS[metric].direction in Direction


def test_the_summary_counts_the_states() -> None:
    trends = [
        trend_of(noisy([1.0] * 20, 1)),
        trend_of([1.0]),
        trend_of(noisy([1.0] * 20 + [2.0] * 9, 2)),
        trend_of(noisy([1.0] * 20 + [2.0], 2)),
        trend_of(noisy([1.0] * 10 + [2.0] * 10 + [1.0] * 10, 2)),
    ]
    text = summary(trends)
    assert text.startswith("5 series: ")
    for state in ("steady", "not known", "changed", "the end departs", "back at an earlier level"):
        assert f"1 {state}" in text


@pytest.mark.parametrize("num_runs", [*range(0, 40), 100, 1000])
def test_any_length_and_any_values(num_runs: int) -> None:
    rng = np.random.default_rng(num_runs)
    for values in (
        rng.lognormal(size=num_runs),
        np.exp(np.cumsum(rng.normal(size=num_runs))),
        rng.choice([1.0, 2.0], num_runs),
    ):
        found = find_levels(values.tolist(), assumed_noise=0.01)
        starts = [*found.starts, num_runs]
        assert all(a < b for a, b in pairwise(starts))
        for step in found.steps:
            assert 0 < step.earliest <= step.index <= step.latest < num_runs
            assert step.interval[0] <= step.change <= step.interval[1]
