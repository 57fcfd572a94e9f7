"""`mbridge history` as a user calls it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.gate.history_data import make_point, write_report
from tests.golden import Sentence

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def history(tmp_path: Path, mbridge: Command) -> Command:
    """Run `mbridge history ...` on a history of the test's own."""

    def run(*args: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
        own = {"MBRIDGE_HISTORY": str(tmp_path / "h" / "history.sqlite"), **env}
        return mbridge("history", *args, env=own, cwd=tmp_path, timeout=1500)

    return run


def write_series(path: Path, levels: list[float], **more: object) -> Path:
    noise = np.exp(0.01 * np.random.default_rng(1).normal(size=len(levels)))
    times = [float(level * factor) for level, factor in zip(levels, noise, strict=True)]
    return write_report(path, [make_point(time, number=i, **more) for i, time in enumerate(times)])


def test_import_list_show_trend(history: Command, tmp_path: Path) -> None:
    report = write_series(tmp_path / "run" / "report.json", [1.0] * 10 + [1.58] * 10 + [1.01] * 10)
    done = history("import", report.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{report.parent}: 30 runs added, 0 already there\n"
    assert history("import", report).stdout == f"{report}: 0 runs added, 30 already there\n"

    listed = history("list").stdout
    assert "t/tp=1" in listed
    assert "2026-01-30 00:00" in listed

    runs = history("show", "t/tp=1", "--last", "3").stdout
    assert runs.count("success") == 3
    run_id = next(line.split("│")[1].strip() for line in runs.splitlines() if "success" in line)
    shown = history("show", run_id).stdout
    assert "verdict: success" in shown
    assert 'environment: driver: "570.1"' in shown
    assert "step_time_s: 1.0" in shown

    trend = history("trend")
    assert trend.returncode == 0
    assert "back at an earlier level; 30 runs, 2026-01-01 to 2026-01-30" in trend.stdout
    assert "(2026-01-11 00:00) on, for 10 runs" in trend.stdout
    assert "back at the level of before run" in trend.stdout
    assert "1 series: 1 back at an earlier level" in trend.stdout
    assert history("trend", "--fail-on-change").returncode == 10
    assert history("trend", "--fail-on-change", "--last", "9").returncode == 0

    found = json.loads(history("trend", "t/*", "--metric", "tflops_per_gpu", "--json").stdout)["trends"]
    assert [change["effect"] for change in found[0]["changes"]] == ["worse", "better"]
    assert found[0]["changes"][0]["run"]["ended_at"].startswith("2026-01-11")


def test_the_published_history_of_three_values(history: Command, tmp_path: Path) -> None:
    values = (943.0, 597.0, 934.0)
    points = [make_point(943.0 / value, number=i) for i, value in enumerate(values)]
    history("import", write_report(tmp_path / "report.json", points))
    plain = history("trend", "--metric", "tflops_per_gpu")
    assert "3 runs are too few to tell a change from noise" in plain.stdout
    assumed = history("trend", "--metric", "tflops_per_gpu", "--assumed-noise", "0.01").stdout
    assert "worse: -36.69 %" in assumed
    assert "943 TFLOP/s/GPU -> 597 TFLOP/s/GPU" in assumed
    assert "back at the level of before run" in assumed


def test_failed_runs_are_in_the_story_and_in_no_level(history: Command, tmp_path: Path) -> None:
    points = [make_point(1.0 + 0.001 * (i % 3), number=i) for i in range(10)]
    points += [make_point(9.0, number=10 + i, verdict="failed") for i in range(5)]
    history("import", write_report(tmp_path / "report.json", points))
    trend = history("trend").stdout
    assert "steady; 10 runs" in trend
    assert "note: 5 failed runs in that time counted for nothing" in trend
    assert "it ended early" in history("show", "t/tp=1").stdout


@pytest.mark.parametrize(
    "args",
    [
        ("list",),
        ("trend",),
        ("show", "x"),
        ("import", "nothing.json"),
        ("import",),
        ("trend", "--metric", "step_time"),
        ("trend", "--last", "0"),
        ("trend", "--assumed-noise", "0"),
        ("trend", "--history", "bad.json"),
        ("import", "bad.json", "--history", "bad.json"),
        ("list", "--history", "."),
    ],
    ids=[
        "list",
        "trend",
        "show x",
        "import nothing json",
        "import",
        "trend metric step time",
        "trend last 0",
        "trend assumed noise 0",
        "trend history bad json",
        "import bad json history bad",
        "list history",
    ],
)
def test_bad_input_is_one_line(history: Command, tmp_path: Path, sentence: Sentence, args: tuple[str, ...]) -> None:
    (tmp_path / "bad.json").write_text('{"schema_version": 1}')
    done = history(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    sentence(done.stderr, runs=r"(?<=runs\.txt \()\d+ runs?(?=\))")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [("list", "--point", "no*"), ("trend", "no*"), ("show", "t/tp=2"), ("show", "")],
    ids=["point no matches no point", "no matches no point", "t tp 2 is neither", "is the start of several"],
)
def test_unknown_names_are_one_line(
    history: Command, tmp_path: Path, sentence: Sentence, args: tuple[str, ...]
) -> None:
    history("import", write_report(tmp_path / "report.json", [make_point(number=i) for i in range(20)]))
    done = history(*args)
    assert done.returncode == 2
    sentence(done.stderr)
    assert done.stderr.count("\n") == 1


def test_a_bad_report_does_not_keep_the_others_out(history: Command, tmp_path: Path, sentence: Sentence) -> None:
    (tmp_path / "bad.json").write_text("{")
    good = write_report(tmp_path / "good.json", [make_point(), make_point(number=1, verdict="skipped")])
    done = history("import", "bad.json", good)
    assert done.returncode == 2
    assert done.stdout == f"{good}: 1 run added, 0 already there, left out: 1 skipped\n"
    assert "bad.json:" in done.stderr
    sentence(done.stderr)


def test_what_is_judged_again_is_said(history: Command, tmp_path: Path) -> None:
    report = write_report(tmp_path / "r.json", [make_point()])
    history("import", report)
    write_report(report, [make_point(verdict="failed")])
    text = f"{report}: 0 runs added, 0 already there, 1 known as good and failed from now on\n"
    assert history("import", report).stdout == text


def test_names_cannot_reach_the_terminal_raw(history: Command, tmp_path: Path) -> None:
    label = "\x1b[31m<script>\u202e\"'😀" + "x" * 300
    more = {"label": label, "environment": {"driver": "\x1b]0;evil\x07", "nodes": ["\x1b[2J"]}}
    points = [
        make_point(1.0 if i < 10 else 2.0, number=i, **(more if i >= 10 else {"label": label})) for i in range(20)
    ]
    points.append(make_point(number=20, label=label, verdict="failed", reasons=["\x1b[2Jgone\nsecond line"]))
    history("import", write_report(tmp_path / "report.json", points))
    run_id = json.loads(history("trend", "--json").stdout)["trends"][0]["changes"][0]["run"]["run_id"]
    outputs = [history(*args) for args in (("list",), ("trend",), ("show", f"t/{label}"), ("show", run_id))]
    outputs += [history("show", "\x1b[2J"), history("trend", "\x1b[2J"), history("trend", "--metric", "\x1b[2J")]
    for done in outputs:
        text = done.stdout + done.stderr
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "\\x1b[31m<script>\\x202e\"'😀" in outputs[1].stdout


def test_numpy_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, cloudai_mbridge.cli, cloudai_mbridge.commands.gate.history; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"
