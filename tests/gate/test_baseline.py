"""Baseline files: what is written reads back, contradictions are refused, and no writer loses another's work."""

import os
import signal
import stat
import subprocess
import sys
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.gate.baseline import (
    Baseline,
    BaselinePoint,
    load_baseline,
    read_bytes,
    render_baseline,
    replace_if_unchanged,
    summarize_metric,
    value_to_toml,
)
from cloudai_mbridge.gate.promotion import oddities
from cloudai_mbridge.models.loading import is_baseline
from cloudai_mbridge.models.toml_source import read_toml
from cloudai_mbridge.report.model import comparability_id
from tests.golden import Sentence

TEXT = st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
POINT: dict[str, Any] = {
    "point": "sweep/tp2",
    "promoted_by": "Ada",
    "promoted_at": "2026-11-21T12:00:00+00:00",
    "reason": "the first one",
    "comparability": {"device": "CPU", "tp": 2},
    "metrics": [
        {"name": "step_time_s", "unit": "s", "direction": "lower", "value": 0.2, "noise": 0.693, "n": 3},
        {"name": "loss_curve", "unit": "", "direction": "same", "value": [4.0, 2.0], "noise": 0.0, "n": 3},
    ],
    "runs": [
        {
            "run_id": f"r{i}",
            "ended_at": f"2026-11-2{2 * i}",
            "nodes": [f"n{i}"],
            "values": {"step_time_s": time, "loss_curve": [4.0, 2.0]},
        }
        for i, time in enumerate((0.1, 0.2, 0.4))
    ],
}


def _point(**changes: Any) -> BaselinePoint:
    data = {**POINT, **changes}
    fields = {name: value_to_toml(value) for name, value in data["comparability"].items()}
    return BaselinePoint(
        **{"comparability_id": comparability_id(data["comparability"]), **data, "comparability": fields}
    )


def _text(*points: BaselinePoint) -> str:
    return render_baseline(Baseline(version=1, points=list(points)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "b.toml"


def test_a_baseline_reads_back(path: Path) -> None:
    baseline = Baseline(version=1, points=[_point(), _point(point="a/b", environment={"git": {"dirty": True}})])
    path.write_text(render_baseline(baseline))
    loaded = load_baseline(path)
    assert sorted(loaded.points, key=str) == sorted(baseline.points, key=str)
    assert [point.point for point in loaded.points] == ["a/b", "sweep/tp2"]
    assert render_baseline(loaded) == path.read_text()
    assert is_baseline(read_toml(path))


@given(st.dictionaries(TEXT, JSON, max_size=5), TEXT.filter(bool))
@settings(max_examples=200, deadline=None, database=None)
def test_any_comparability_and_name_read_back(fields: dict[str, Any], name: str) -> None:
    point = _point(comparability=fields, point=name)
    (data,) = tomllib.loads(_text(point))["points"]
    back = BaselinePoint(**data)
    assert back == point
    assert back.comparability == fields
    assert comparability_id(back.comparability) == point.comparability_id


def test_the_digest_is_of_canonical_json() -> None:
    assert comparability_id({}) == "44136fa355b3678a"
    assert comparability_id({"b": [1, None], "a": "é"}) == comparability_id({"a": "é", "b": [1, None]})
    assert comparability_id({"a": 1}) != comparability_id({"a": 1.0})


def test_values_are_geometric_means_and_noise_is_relative() -> None:
    assert summarize_metric([0.1, 0.2, 0.4]) == (0.2, 0.693)
    assert summarize_metric([[4.0, 1.0], [1.0, 1.0]]) == ([2.0, 1.0], 0.0)
    assert summarize_metric([3.0]) == (3.0, None)


def test_a_baseline_of_one_run_can_be_read(path: Path) -> None:
    metric = {"name": "step_time_s", "unit": "s", "direction": "lower", "value": 0.1, "n": 1}
    run = {**POINT["runs"][0], "values": {"step_time_s": 0.1}}
    path.write_text(_text(_point(metrics=[metric], runs=[run])))
    (reference,) = load_baseline(path).references()
    assert reference.runs[0].values == {"step_time_s": (0.1,)}
    assert reference.bounds == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value = 0.2,", "value = 0.19,"),
        ("value = [4.0, 2.0]", "value = [4.0, 1.9]"),
        ("value = [4.0, 2.0]", "value = [4.0]"),
        ("noise = 0.693", "noise = 0.1"),
        (" noise = 0.693,", ""),
        ("step_time_s = 0.4", "step_time_s = 0.3"),
        ("n = 3", "n = 5"),
        ("step_time_s = 0.4, ", ""),
        ("step_time_s = 0.4,", "step_time_s = 0.4, peak_memory_gib = 1.0,"),
        ("tp = 2", "tp = 4"),
        ('unit = "s"', 'unit = "ms"'),
        ('direction = "lower"', 'direction = "higher"'),
        ('direction = "lower"', 'direction = "down"'),
        ('name = "step_time_s"', 'name = "step_time"'),
        ('name = "loss_curve"', 'name = "step_time_s"'),
        ('run_id = "r1"', 'run_id = "r0"'),
        ("value = 0.2,", "value = nan,"),
        ("value = 0.2,", "value = -0.2,"),
        ("value = 0.2,", 'value = "0.2",'),
        ("value = 0.2,", "value = 0.2, bounds = { lower = 0.0, upper = 1.01 },"),
        ("value = 0.2,", "value = 0.2, bounds = { lower = -1.01, upper = 0.0 },"),
        ("value = 0.2,", "value = 0.2, limit = 1,"),
        ('reason = "the first one"\n', ""),
        ('reason = "the first one"', 'reason = " "'),
        ("promoted_by", "promoted_bye"),
        ("2026-11-21T12:00:00+00:00", "yesterday"),
        ("2026-11-21T12:00:00+00:00", "2026-11-21"),
        ("version = 1", "version = 2"),
        ("version = 1", "version = true"),
        ("version = 1", ""),
        ("tp = 2", "tp = { x = 1 }"),
        ("tp = 2", 'tp = { json = "[" }'),
        ("tp = 2", "tp = 2026-01-01"),
    ],
)
def test_what_contradicts_itself_is_refused(path: Path, sentence: Sentence, old: str, new: str) -> None:
    text = _text(_point())
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadInput) as refused:
        load_baseline(path)
    sentence(refused)


def test_a_missing_file_and_a_point_that_is_there_twice_are_refused_and_rounding_is_no_edit(
    path: Path, sentence: Sentence
) -> None:
    with pytest.raises(BadInput) as caught:
        load_baseline(path)
    sentence(caught)
    path.write_text(_text(_point(), _point()))
    with pytest.raises(BadInput, match=r"points\[1\].point:") as caught:
        load_baseline(path)
    sentence(caught)
    path.write_text(_text(_point()).replace("value = 0.2,", "value = 0.2000004,"))
    assert load_baseline(path)


NOW = datetime.fromisoformat("2026-11-22T12:00:00+00:00")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"promoted_at": "2026-01-01T00:00:00Z"}, "was promoted 325 days ago, on 2026-01-01"),
        ({"promoted_at": "2027-01-01T00:00:00Z"}, "was promoted in the future"),
        ({}, "has 3 runs, 5 are the rule"),
        ({}, "step_time_s varies by 69.3% between runs, 2.0% is the rule"),
        ({"runs": [{**run, "nodes": ["n"]} for run in POINT["runs"]]}, "all its runs are of the same nodes"),
        (
            {"runs": [{**run, "ended_at": f"2026-11-20T0{i}:00:00Z"} for i, run in enumerate(POINT["runs"])]},
            "all its runs ended within a day, so the noise between days is not in it",
        ),
        (
            {"metrics": [{**POINT["metrics"][0], "bounds": {"lower": -0.5, "upper": 0.03}}]},
            "step_time_s has the bounds -50.0% to +3.0%, the built-in tolerance is 3.0%",
        ),
        ({"accepted": ["it was slower"]}, "was promoted although it was slower"),
        ({"metrics": POINT["metrics"][1:]}, "has no step_time_s"),
    ],
)
def test_what_is_odd_is_said(changes: dict[str, Any], words: str) -> None:
    found = oddities(Baseline(version=1, points=[_point(**changes)]), NOW, 90)
    assert any(words in text and text.startswith("sweep/tp2: ") for text in found)


def test_built_in_bounds_and_runs_of_several_days_are_not_odd() -> None:
    metrics = [
        {**metric, "bounds": {"lower": -tolerance, "upper": tolerance}}
        for metric, tolerance in zip(POINT["metrics"], (0.03, 0.02), strict=True)
    ]
    found = oddities(Baseline(version=1, points=[_point(metrics=metrics)]), NOW, 90)
    assert not any("bounds" in text or "within a day" in text for text in found)
    assert "no points" in oddities(Baseline(version=1), NOW, 90)[0]


def test_a_file_is_replaced_only_if_it_is_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "conf/baselines/b.toml"  # directories are made
    assert replace_if_unchanged(path, None, b"one")
    assert not replace_if_unchanged(path, None, b"two")
    assert not replace_if_unchanged(path, b"other", b"two")
    assert path.read_bytes() == b"one"
    assert replace_if_unchanged(path, b"one", b"two")
    assert [file.name for file in path.parent.iterdir()] == ["b.toml"]


def test_the_mode_and_a_link_are_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    real.write_bytes(b"one")
    real.chmod(0o640)
    link.symlink_to(real)
    assert replace_if_unchanged(link, b"one", b"two")
    assert link.is_symlink()
    assert (real.read_bytes(), stat.S_IMODE(real.stat().st_mode)) == (b"two", 0o640)


def test_what_cannot_be_written_is_said(tmp_path: Path, sentence: Sentence) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolFailure, match=r"b\.toml:") as caught:
        replace_if_unchanged(tmp_path / "file/b.toml", None, b"one")
    sentence(caught)
    with pytest.raises(BadInput) as caught:
        read_bytes(tmp_path)
    sentence(caught)


WRITER = """
import sys
from pathlib import Path
from cloudai_mbridge.gate.baseline import Baseline, load_baseline, read_bytes, render_baseline, replace_if_unchanged

path, writer = Path(sys.argv[1]), sys.argv[2]
first = load_baseline(path).points[0]
for i in range(12):
    while True:
        old = read_bytes(path)
        points = [*load_baseline(path).points, first.model_copy(update={"point": f"{writer}/{i}"})]
        if replace_if_unchanged(path, old, render_baseline(Baseline(version=1, points=points)).encode()):
            break
"""


@pytest.mark.process
def test_writers_at_the_same_time_lose_nothing(path: Path) -> None:
    path.write_text(_text(_point()))
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, str(writer)]) for writer in range(4)]
    assert [process.wait(120) for process in writers] == [0, 0, 0, 0]
    assert len(load_baseline(path).points) == 1 + 4 * 12
    assert [file.name for file in path.parent.iterdir()] == ["b.toml"]


@pytest.mark.process
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_whoever_is_killed_leaves_the_old_file_whole(path: Path, call: str) -> None:
    path.write_bytes(b"old")
    program = f"""
import os, signal, sys
from pathlib import Path
from cloudai_mbridge.gate.baseline import replace_if_unchanged
os.{call} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_if_unchanged(Path(sys.argv[1]), b"old", b"new" * 100000)
"""
    done = subprocess.run([sys.executable, "-c", program, path], timeout=600, check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert replace_if_unchanged(path, b"old", b"new")
    assert (path.read_bytes(), [file.name for file in path.parent.iterdir()]) == (b"new", ["b.toml"])
