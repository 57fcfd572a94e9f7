"""`on_completion`: a real command and a real server are told how `mbridge run` ended, and its exit code stays."""

import csv
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import serving

STAND_IN = Path(__file__).parents[1] / "stand_in" / "training.py"
LOCAL = f'name = "l"\nscheduler = "local"\nmonitor_interval = 0.3\npython_executable = "{STAND_IN}"\n'
SECRET = "T0123/B0123/never-to-be-seen"
# Keeps what it is told, and uses the run as anybody may whose run is over
KEEP = f'cat > "$1" && {sys.executable} -m cloudai_mbridge export "$MBRIDGE_RUN" --to csv -o "$2"'


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "body.json", tmp_path / "rows.csv"


def asking(kept: tuple[Path, Path]) -> str:
    command = ["sh", "-c", KEEP, "sh", *map(str, kept)]
    return f'on_completion = {{ command = {json.dumps(command)}, webhook_env = "TEAM_HOOK" }}\n'


@pytest.mark.parametrize(("told", "code", "state"), [({}, 0, "success"), ({"at": 2, "exit": 7}, 1, "failed")])
def test_both_are_told_of_the_end(
    start_run: Any, stand_in_test: Any, kept: tuple[Path, Path], told: dict[str, Any], code: int, state: str
) -> None:
    with serving() as server:
        runner = f"retries = 0\n{asking(kept)}"
        tests = [stand_in_test("a", args="mb = [1, 2]\ngb = 8"), stand_in_test("b", told)]
        run = start_run(None, tests, runner=runner, whole_system=LOCAL, env={"TEAM_HOOK": f"{server.url}/{SECRET}"})
        run.finish(code)
    assert "note:" not in run.words, run.words
    (request,) = server.requests
    body = json.loads(request.body)
    assert (request.path, request.headers["content-type"]) == (f"/{SECRET}", "application/json")
    assert json.loads(kept[0].read_text()) == body
    counts = {"success": 3, "failed": 0} if state == "success" else {"success": 2, "failed": 1}
    assert (body["state"], body["error"], body["counts"]) == (state, None, run.report["summary"])
    assert body["counts"].items() >= counts.items()
    assert (body["run"], body["path"], body["scenario"], body["system"]) == (
        *(run.root.name, str(run.root)),
        *("scenario", "l"),
    )
    assert Path(body["report"]).is_file()
    assert body["text"].startswith(f"scenario on l: {state}: ")
    measured = {point["test_id"] + point["label"]: point["metrics"]["step_time_s"] for point in run.report["points"]}
    for fastest in body["fastest"]:
        assert fastest["step_time_s"] == measured[fastest["test"] + fastest["point"]]["capped_mean"]
    assert [row["verdict"] for row in csv.DictReader(kept[1].read_text().splitlines())].count("success") == counts[
        "success"
    ]


def test_both_are_told_of_an_interrupted_run(start_run: Any, stand_in_test: Any, kept: tuple[Path, Path]) -> None:
    with serving() as server:
        tests = [stand_in_test("a", {"step_s": 0.2, "at": 2, "hang": 300})]
        env = {"TEAM_HOOK": server.url}
        run = start_run(None, tests, runner=asking(kept), whole_system=LOCAL, env=env)
        run.wait_for_step("a")
        run.send(signal.SIGINT)
        run.finish(130)
    body = json.loads(server.requests[0].body)
    assert json.loads(kept[0].read_text()) == body
    assert (body["state"], body["counts"]["cancelled"]) == ("cancelled", 1)
    assert body["error"].startswith("interrupted by SIGINT")


def test_what_cannot_be_told_is_one_line(start_run: Any, stand_in_test: Any) -> None:
    asked = 'on_completion = { command = ["no-such-program"], webhook_env = "TEAM_HOOK" }\n'
    env = {"TEAM_HOOK": f"http://127.0.0.1:1/{SECRET}"}
    run = start_run(None, [stand_in_test("a")], runner=asked, whole_system=LOCAL, env=env).finish(0)
    notes = [line for line in run.stdout.splitlines() if line.startswith("note:")]
    assert notes == [
        "note: on_completion: no-such-program: cannot be started (No such file or directory)",
        "note: on_completion: webhook $TEAM_HOOK: Connection refused",
    ]
    assert SECRET not in run.stdout + run.stderr
    held = [path for path in run.root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert held == []
