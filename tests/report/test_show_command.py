"""`mbridge show`: every point of a run, or all about one."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cloudai_mbridge.commands.run.results import show
from cloudai_mbridge.errors import BadInput, MBridgeError
from cloudai_mbridge.report.build import build_report
from cloudai_mbridge.report.text import render_details
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.runner.lock import driver_lock
from tests.golden import Sentence
from tests.report.conftest import ARun, a_log
from tests.report.test_schema import CHECK

pytestmark = pytest.mark.process


@pytest.fixture
def ended(embedded: ARun) -> Path:
    for key in embedded.keys:
        embedded.ended(key, a_log(6))
    return embedded.root


def printed(*arguments: str | Path) -> str:
    done = CliRunner().invoke(show, [*map(str, arguments)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.stdout


def test_every_point_is_shown_with_what_was_rejected(ended: Path) -> None:
    before = sorted(path.relative_to(ended) for path in ended.rglob("*"))
    text, rejected = printed(ended), printed(ended, "mb3")
    assert [name for name in ("mb1", "mb2", "mb3") if f"│ {name} " in text] == ["mb1", "mb2", "mb3"]
    assert "C04" in text
    assert ("C04" in rejected, "Steps counted" in rejected) == (True, False)
    assert sorted(path.relative_to(ended) for path in ended.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize("name", ["t/mb2/0", "t/mb2", "mb2", "b2", "t/mb2/"])
def test_all_about_one_point(ended: Path, name: str) -> None:
    text = printed(ended, name)
    assert "Steps counted: 3-6 (n=4), warm-up 1-2 left out" in text
    assert "t/mb2/0" in text
    assert "mb1" not in text


def test_a_points_layout_job_and_rounded_numbers(ended: Path) -> None:
    text = printed(ended, "mb2")
    words = " ".join(text.split())
    for fact in ("Layout: mb=2, gb=8", "Ranks: 2 on 1 node: n[1-2]", "Job: 17, COMPLETED", "Times: submitted 20"):
        assert fact in words
    assert "Step time: 0.5 ±0 s (median 0.5, 0.5 to 0.5, plain mean 0.5)" in words
    assert not re.search(r"\d\.\d{8}", text), "no digits beyond the error"


def test_the_prediction_of_a_point_is_shown(ended: Path) -> None:
    predicted = {"gpu": None, "step_time_s": 1.23456, "tflops_per_gpu": None, "peak_memory_gib": 70.0}
    point = replace(build_report(ended).points[0], predicted=predicted)
    assert "Predicted:     step time 1.235 s, memory 70 GiB\n" in render_details(point, ended)


def test_json_is_what_the_report_has(ended: Path) -> None:
    whole: dict[str, Any] = json.loads(printed(ended, "--json"))
    assert [point["label"] for point in whole["points"]] == ["mb1", "mb2", "mb3"]
    assert json.loads(printed(ended, "mb2", "--json")) == {"points": [whole["points"][1]]}


@pytest.mark.parametrize("name", ["mb", "x"])
def test_a_name_that_is_not_one_point(ended: Path, sentence: Sentence, name: str) -> None:
    with pytest.raises(BadInput) as caught:
        printed(ended, name)
    sentence(caught)


def test_a_run_under_way_shows_its_results_so_far(embedded: ARun) -> None:
    embedded.ended("t/mb1/0", a_log(6))
    journal = Journal(embedded.root / "journal.sqlite")
    journal.decided("t/mb1/0", "success", [])
    journal.close()
    with driver_lock(embedded.root):
        text, whole = printed(embedded.root), json.loads(printed(embedded.root, "--json"))
        assert "Steps counted: 3-6" in printed(embedded.root, "mb1")
        assert "  - waits to be submitted" in printed(embedded.root, "mb2")
    assert "results so far: 1 of 2 runs ended; held by process" in text
    assert "mbridge cancel" not in text
    assert whole["summary"] == {"success": 1, "failed": 0, "skipped": 0, "rejected": 1, "unfinished": 1}
    CHECK.validate(whole)
    assert "no running process holds this run" in printed(embedded.root)


def test_a_directory_of_no_run_is_refused(ended: Path) -> None:
    shutil.rmtree(ended)
    with pytest.raises(MBridgeError):
        printed(ended)
