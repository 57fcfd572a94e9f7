"""`mbridge runs`, and `mbridge logs` without a point: what they say of runs in every state."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.runner import Journal
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from tests.commands.conftest import Run, a_run, change_plan, dry, finish, name_of
from tests.golden import Sentence
from tests.report.conftest import EMBEDDED, ARun

RUNNING = JobStatus("RUNNING", JobClass.ACTIVE)
KEYS = ("t/mb1/0", "t/mb2/0")


pytestmark = pytest.mark.process


def test_every_state(mbridge_here: Run, tmp_path: Path) -> None:
    results = tmp_path / "results"
    finish(a_run(results, name_of(1)))
    finish(a_run(results, name_of(2)), good=1)
    dry(a_run(results, name_of(3)))
    left = a_run(results, name_of(4))
    left.ended(KEYS[0], "", RUNNING)
    change_plan(a_run(results, name_of(5)), version=99)
    (results / name_of(6)).mkdir()
    held = a_run(results, name_of(7))
    held.ended(KEYS[0], "", RUNNING)
    with driver_lock(held.root):
        code, out, err = mbridge_here("runs", "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["runs"]
    assert [row["name"] for row in rows] == [name_of(day) for day in (7, 6, 5, 4, 3, 2, 1)]
    assert [row["state"] for row in rows] == ["running", "damaged", "damaged", "open", "dry run", "done", "done"]
    assert rows[0]["held_by"].startswith(f"process {os.getpid()} on ")
    assert rows[0]["counts"] == rows[3]["counts"] == {"running": 1, "waiting": 1}
    assert rows[1]["why"].startswith("is incomplete (plan.json is missing)")
    assert rows[2]["why"].startswith("plan.json: has version 99")
    assert rows[5]["counts"] == {"success": 1, "failed": 1}
    assert rows[5]["best"] == {"step_time_s": 0.5, "point": "t/mb1"}
    assert rows[6] == {
        "name": name_of(1),
        "path": str(results / name_of(1)),
        "started_at": "2026-11-01 02:00:00+00:00",
        "state": "done",
        "held_by": None,
        "counts": {"success": 2},
        "best": {"step_time_s": 0.25, "point": "t/mb2"},
        "why": "",
        "as_of": None,
        "size_bytes": None,
    }


def test_points_with_different_work_are_ranked_by_rate(mbridge_here: Run, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    sweep = {**EMBEDDED["cmd_args"], "mb": 1, "gb": [4, 8]}
    run = ARun(tmp_path / "results" / name_of(1), {**EMBEDDED, "cmd_args": sweep})
    finish(run, times=(0.25, 0.4))
    (row,) = json.loads(mbridge_here("runs", "--json")[1])["runs"]
    assert row["best"] == {"step_time_s": 0.4, "point": "t/gb8"}


def test_the_list_on_80_columns(mbridge_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    finish(a_run(results, name_of(1)))
    a_run(results, name_of(2, "a_scenario_with_a_longer_name"))
    (results / name_of(3)).mkdir()
    monkeypatch.setattr("cloudai_mbridge.commands.console.SteadyConsole.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = mbridge_here("runs")
    assert code == 0
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["started", "(UTC)", "state", "run"]
    assert f"2026-11-01 02:00  done     {name_of(1)}" in lines
    assert f"{'':27}2 success; best: t/mb2, 0.25 s" in lines
    assert f"2026-11-02 02:00  open     {name_of(2, 'a_scenario_with_a_longer_name')}" in lines
    assert f"2026-11-03 02:00  damaged  {name_of(3)}" in lines


def test_how_many(mbridge_here: Run, tmp_path: Path) -> None:
    for day in range(1, 4):
        dry(a_run(tmp_path / "results", name_of(day)))
    assert [row["name"] for row in json.loads(mbridge_here("runs", "--json", "-n", "1")[1])["runs"]] == [name_of(3)]
    out = mbridge_here("runs", "-n", "1")[1]
    assert "2 older runs not shown; -n 3 lists all" in out
    assert name_of(2) not in out
    assert "not shown" not in mbridge_here("runs")[1]


def test_one_directory(mbridge_here: Run, tmp_path: Path) -> None:
    dry(a_run(tmp_path / "results", name_of(1)))
    assert mbridge_here("runs", "--output-dir", str(tmp_path)) == (0, "no runs\n", "")
    dry(a_run(tmp_path / "out", name_of(2)))
    assert name_of(1) not in (out := mbridge_here("runs", "--output-dir", "out")[1])
    assert name_of(2) in out
    code, _, err = mbridge_here("runs", "--output-dir", "none")
    assert (code, err) == (2, "error: none: no such directory; give one that holds runs\n")
    assert json.loads(mbridge_here("runs", "--output-dir", str(tmp_path), "--json")[1]) == {"runs": []}


def spoil_row(run: ARun) -> None:
    journal = Journal(run.root / "journal.sqlite")
    with journal.transaction():
        journal._db.execute("UPDATE attempts SET status = '{'")
    journal.close()


DAMAGE: dict[str, Callable[[ARun], Any]] = {
    "no plan": lambda run: (run.root / "plan.json").write_text("{"),
    "no journal": lambda run: (run.root / "journal.sqlite").write_bytes(b"x" * 5000),
    "a row": spoil_row,
    "lost journal": lambda run: ((run.root / "driver.lock").touch(), (run.root / "journal.sqlite").unlink()),
    "no report": lambda run: (run.root / "report.json").write_text("{"),
    "link for a lock": lambda run: (run.root / "driver.lock").symlink_to("elsewhere"),
}


@pytest.mark.parametrize("spoil", DAMAGE.values(), ids=DAMAGE)
def test_one_damaged_run_does_not_break_the_list(
    spoil: Callable[[ARun], Any], mbridge_here: Run, tmp_path: Path
) -> None:
    finish(a_run(tmp_path / "results", name_of(1)))
    spoil(finish(a_run(tmp_path / "results", name_of(2))))
    code, out, err = mbridge_here("runs", "--json")
    damaged, good = json.loads(out)["runs"]
    assert (code, err, good["state"], damaged["state"]) == (0, "", "done", "damaged")
    assert damaged["why"]
    assert str(tmp_path) not in damaged["why"].partition(":")[0]


def test_a_name_cannot_control_the_terminal(mbridge_here: Run, tmp_path: Path) -> None:
    dry(a_run(tmp_path / "results", name_of(1, "\x1b[31m")))
    out = mbridge_here("runs")[1]
    assert "\x1b" not in out
    assert "\\x1b[31m" in out


# Logs


def test_logs_without_a_point_lists_them(mbridge_here: Run, tmp_path: Path, sentence: Sentence) -> None:
    finish(a_run(tmp_path / "results", name_of(1)), good=1)
    code, out, err = mbridge_here("logs", "latest")
    assert (code, out) == (0, "t/mb1/0  success\nt/mb2/0  failed\n")
    sentence(err)
    code, out, _ = mbridge_here("logs", "gpt_tiny", "mb1", "-n", "1")
    assert code == 0
    assert '"step": 6' in out


@pytest.mark.parametrize("option", ["--follow", "--stderr", "--attempt=1", "--lines=0"])
def test_options_of_a_log_need_a_point(sentence: Sentence, option: str, mbridge_here: Run, tmp_path: Path) -> None:
    run = finish(a_run(tmp_path / "results", name_of(1)))
    code, out, err = mbridge_here("logs", str(run.root), option)
    assert (code, out) == (2, "")
    sentence(err)


def test_logs_of_a_dry_run_and_of_a_lost_journal(mbridge_here: Run, tmp_path: Path, sentence: Sentence) -> None:
    dry(a_run(tmp_path / "results", name_of(1)))
    code, out, err = mbridge_here("logs", name_of(1))
    assert (code, out) == (6, "")
    sentence(err)
    DAMAGE["lost journal"](run := a_run(tmp_path / "results", name_of(2)))
    code, _, err = mbridge_here("logs", str(run.root))
    assert code == 7
    assert "journal.sqlite:" in err
    sentence(err)


# Status


def test_status_of_many_points(mbridge_here: Run, tmp_path: Path, sentence: Sentence) -> None:
    """Failed and running ones come first; the rest is counted, and --all lists it."""
    sweep = {**EMBEDDED["cmd_args"], "mb": 1, "gb": [8 * number for number in range(1, 121)]}
    (tmp_path / "results").mkdir()
    run = ARun(tmp_path / "results" / name_of(1), {**EMBEDDED, "cmd_args": sweep})
    journal = Journal(run.root / "journal.sqlite")
    for key in run.keys[:60]:
        journal.decided(key, "success", [])
    for key in run.keys[60:70]:
        journal.decided(key, "failed", ["why"])
    journal.close()
    lines = mbridge_here("status", "latest")[1].splitlines()
    rows = [line for line in lines if line.startswith("│ t/")]
    assert len(rows) == 50
    assert sum("failed" in row for row in rows) == 10
    assert "and 70 more: 60 success, 10 waiting; --all lists them" in lines
    sentence(lines[-1])
    out = mbridge_here("status", "latest", "--all")[1]
    assert len([line for line in out.splitlines() if line.startswith("│ t/")]) == 120
    assert "--all" not in out
    assert len(json.loads(mbridge_here("status", "latest", "--json")[1])["runs"]) == 120


def test_sizes_and_the_time_of_open_runs(mbridge_here: Run, tmp_path: Path) -> None:
    finish(a_run(tmp_path / "results", name_of(1)))
    left = a_run(tmp_path / "results", name_of(2))
    left.ended(KEYS[0], "x" * (3 << 20), RUNNING)
    opened, done = json.loads(mbridge_here("runs", "--json", "--size")[1])["runs"]
    assert (opened["as_of"] is None, done["as_of"] is None) == (False, True)
    assert opened["size_bytes"] > 3 << 20
    assert re.search(r"1 running, 1 waiting; as of \d\d:\d\d:\d\d UTC; 3\.\d MiB", mbridge_here("runs", "--size")[1])
    assert "MiB" not in mbridge_here("runs")[1]
