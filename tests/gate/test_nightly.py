"""A gate that looks every night: the rate of all nights together, and drifts."""

import math
import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloudai_mbridge.gate.compare.policy import load_policy
from cloudai_mbridge.gate.compare.verdict import GateResult, GateVerdict
from cloudai_mbridge.gate.history.store import History
from cloudai_mbridge.gate.run import run_gate
from cloudai_mbridge.gate.statistics.always_valid import find_drift
from cloudai_mbridge.gate.statistics.nights import night_levels, night_numbers
from tests.gate.history_data import make_point, write_report

START = datetime(2026, 1, 1, 2, tzinfo=UTC)


def walk(sd: float, per_week: float, nights: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return list(sd * rng.standard_normal(nights) + per_week / 7 * np.arange(nights))


def first_alarm(values: list[float], rate: float) -> int | None:
    for n in range(1, len(values) + 1):
        drift = find_drift(values[:n], len(values))
        if drift is not None and drift.evidence * rate >= 1:
            return n
    return None


def test_a_drift_of_three_per_mille_a_week_is_found_in_four_weeks() -> None:
    found = [first_alarm(walk(0.003, 0.003, 60, seed), 0.005) for seed in range(40)]
    assert sum(n is not None and n <= 28 for n in found) >= 0.8 * 40


def test_sixty_looks_keep_the_rate() -> None:
    """At a rate of 20 %, of which a wrong one would show in so few series."""
    alarms = sum(first_alarm(walk(0.003, 0.0, 60, seed), 0.2) is not None for seed in range(60))
    assert alarms <= 18


def test_a_drift_says_how_fast_and_since_when() -> None:
    values = [0.001 * (-1) ** i + 0.001 * max(0, i - 21) for i in range(42)]
    drift = find_drift(values, 60)
    assert drift is not None
    assert drift.evidence > 1000
    assert drift.since == 21
    assert drift.slope == pytest.approx(0.001, rel=0.1)
    assert drift.change == pytest.approx(0.02, rel=0.1)


def test_what_gets_faster_or_stays_is_no_drift() -> None:
    for values in ([-0.01 * i for i in range(30)], [0.0] * 30, walk(0.001, 0.0, 30, 1)):
        drift = find_drift(values, 60)
        assert drift is not None
        assert drift.evidence < 10
    assert find_drift([0.0, 1.0, 2.0], 60) is None


def test_nights_are_apart_by_six_hours() -> None:
    evening, morning = "2026-03-01T23:00:00+00:00", "2026-03-02T04:00:00+02:00"
    next_evening = "2026-03-02T23:30:00+00:00"
    assert list(night_numbers([next_evening, evening, "", morning, "2026-03-03"])) == [1, 0, -1, 0, -1]


def test_the_level_of_a_night_does_not_depend_on_which_points_it_has() -> None:
    """The slow point misses the first nights: without its own level, the later ones would look slower."""
    nights = [(START + timedelta(days=i)).isoformat() for i in range(6)]
    slow = [(night, 5.0 + 0.01 * i) for i, night in enumerate(nights)]
    levels = night_levels({"fast": [(n, 0.01 * i) for i, n in enumerate(nights)], "slow": slow[3:]})
    assert np.diff(levels.levels) == pytest.approx([0.01] * 5, abs=1e-6)
    assert levels.began[0] == nights[0]


def night_of(path: Path, number: int, level: float, rng: random.Random, points: int = 3) -> Path:
    runs = [
        make_point(level * (1 + point) * math.exp(rng.gauss(0, 0.002)), number=number, label=f"tp={point}", steps=8)
        for point in range(points)
        for _ in range(1)
    ]
    for run in runs:  # of which no two have the same steps
        for step in run["steps"]:
            step["step_time_s"] *= math.exp(rng.gauss(0, 0.001))
            step["tflops_per_gpu"] = 943.0 / step["step_time_s"]
    return write_report(path / f"night{number}.json", runs, created_at=(START + timedelta(days=number)).isoformat())


@pytest.fixture
def judged(tmp_path: Path) -> Any:
    """Judge a night after those before it: judged(number of nights, change a week)."""

    def judge(nights: int, per_week: float, policy: str = "nights = 60", since: int = 0) -> GateResult:
        rng = random.Random(3)
        with History(tmp_path / f"{nights}-{per_week}.sqlite") as history:
            for number in range(nights):
                level = 1 + per_week / 7 * max(0, number - since)
                last = night_of(tmp_path, number, level, rng)
                if number < nights - 1:
                    history.import_report(last)
        file = tmp_path / "policy.toml"
        file.write_text(f'name = "p"\nmin_runs = 1\n[history]\nfile = "{nights}-{per_week}.sqlite"\n{policy}\n')
        return run_gate([last], load_policy(file), date(2026, 6, 1))

    return judge


def test_a_gate_over_a_history_finds_a_drift(judged: Any) -> None:
    result = judged(30, 0.003)
    assert result.verdict is GateVerdict.REGRESSION
    (found,) = [point for point in result.shared if "nights" in point.point]
    assert found.point == "3 points over 30 nights"
    assert found.verdict is GateVerdict.REGRESSION
    assert "drifts by +0.3" in found.metrics[0].words
    assert "a week since about 2026-01-01" in found.metrics[0].words
    assert any(note.startswith("night 30 of 60: the false-alarm rate of 1.00% is kept") for note in result.notes)


def test_without_a_drift_it_says_so(judged: Any) -> None:
    result = judged(30, 0.0)
    (found,) = [point for point in result.shared if "nights" in point.point]
    assert (found.verdict, found.metrics[0].words) == (GateVerdict.PASS, "no drift in 30 nights")
    assert result.verdict is not GateVerdict.REGRESSION


def test_the_nights_begin_where_the_policy_says(judged: Any) -> None:
    result = judged(30, 0.003, "nights = 60\nsince = 2026-01-20")
    assert "over 11 nights" in result.shared[-1].point


def test_a_block_of_nights_is_followed_by_another(judged: Any) -> None:
    result = judged(30, 0.003, "nights = 20")
    assert "over 10 nights" in result.shared[-1].point


def test_without_nights_every_gate_has_the_whole_rate(judged: Any) -> None:
    result = judged(8, 0.0, "last = 5")
    assert not result.shared
    assert not any("night " in note for note in result.notes)
