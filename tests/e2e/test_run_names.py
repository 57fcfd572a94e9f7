"""Runs by name, with real processes: one in a directory of its own is found, cancelled and resumed by name."""

import json
import os
from pathlib import Path
from typing import Any

from tests.golden import RUN_TIME, Sentence

STAND_IN = Path(__file__).parents[1] / "stand_in" / "training.py"
LOCAL = f'name = "l"\nscheduler = "local"\nmonitor_interval = 0.3\npython_executable = "{STAND_IN}"\n'


def test_latest_of_a_run_elsewhere(
    start_run: Any, stand_in_test: Any, until: Any, mbridge: Any, tmp_path: Path, sentence: Sentence
) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def named(*argv: str) -> Any:
        done = mbridge(*argv, cwd=tmp_path, env=env)
        assert "Traceback" not in done.stderr
        return done

    def listed() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(named("runs", "--json").stdout)["runs"]
        return rows

    assert named("status", "latest").returncode == 2
    told = {"step_s": 0.2, "only_first": str(tmp_path / "first"), "at": 2, "hang": 300}
    tests = [stand_in_test("quick"), stand_in_test("long", told, steps=8)]
    run = start_run(None, tests, whole_system=LOCAL, env=env)
    run.wait_for_step("long", 2)
    until("the quick one's verdict", lambda: run.query("SELECT 1 FROM runs WHERE verdict = 'success'"))
    until("a running job", lambda: run.query("SELECT 1 FROM attempts WHERE status LIKE '%\"RUNNING\"%'"))
    (row,) = listed()
    assert (row["path"], row["state"]) == (str(run.root), "running")
    assert row["held_by"].startswith(f"process {run.process.pid} on ")
    assert row["counts"] == {"success": 1, "running": 1}

    done = named("logs", "latest")
    assert (done.returncode, done.stderr) == (0, f"note: latest is {run.root}\n")
    assert done.stdout.splitlines() == ["quick/single/0  success", "long/single/0   running"]
    assert named("logs", "scenario", "quick").stdout == (run.root / "quick/single/0/stdout.txt").read_text()
    assert "error: latest" not in (refused := named("resume", "latest")).stderr
    assert refused.returncode == 5

    refused = named("cancel", "latest")
    assert (refused.returncode, "is in neither results/ nor $MBRIDGE_RESULTS" in " ".join(refused.stderr.split())) == (
        2,
        True,
    )
    assert named("cancel", str(run.root)).returncode == 0
    run.finish(143)
    (row,) = listed()
    assert (row["state"], row["counts"], row["best"]) == ("open", {"success": 1, "interrupted": 1}, None)
    assert named("resume", "latest").returncode == 0
    (row,) = listed()
    assert (row["state"], row["counts"]) == ("done", {"success": 2})
    assert row["best"] is None, "of two tests"

    dry = start_run(None, tests, whole_system=LOCAL, env=env, command="dry-run").finish(0)
    assert [row["state"] for row in listed()] == ["dry run", "done"]
    sentence(named("generate-report", "--result-dir", "latest").stderr, time=RUN_TIME)
    ambiguous = named("status", "scenario_")
    assert ambiguous.returncode == 2
    assert {dry.root.name, run.root.name} <= set(ambiguous.stderr.replace(",", " ").replace(";", " ").split())
    assert not os.path.lexists(tmp_path / "results"), "to look creates nothing"
