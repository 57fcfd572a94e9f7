"""`mbridge status`, `cancel`, `logs` and `resume`, on runs that are driven, abandoned, finished, or none."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.golden import RUN_TIME, Sentence

pytestmark = pytest.mark.slurm

LONG = {"step_s": 0.2, "at": 3, "hang": 300}
TOKEN = "hf_" + "NeverToBeSeen" * 3


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=3)


def wait_for_running(run: Any, count: int, until: Any) -> None:
    running = "SELECT count(*) FROM attempts WHERE status LIKE '%\"RUNNING\"%'"
    until(f"{count} running jobs", lambda: (run.query(running) or [(0,)])[0][0] >= count)


def num_jobs_ever(sandbox: Any) -> int:
    return len(sandbox.run("squeue", "--noheader", "--array", "--states=all").stdout.splitlines())


def contents_of(root: Path) -> dict[Path, bytes]:
    """Return what every file of a run's directory holds."""
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def row_of(done: Any, key: str) -> list[str]:
    """Return the cells of a run's row in the table of `mbridge status`."""
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"│ {key} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


# ---- status


def test_status_while_it_is_driven_and_after(start_run: Any, stand_in_test: Any, until: Any, sandbox: Any) -> None:
    tests = [
        stand_in_test("quick"),
        stand_in_test("long", LONG, run='time_limit = "1:00:00"'),
        stand_in_test("last", run='[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "long"\n'),
    ]
    run = start_run(sandbox, tests)
    until("the quick one's end", lambda: run.query("SELECT 1 FROM runs WHERE verdict = 'success'"))
    wait_for_running(run, 1, until)
    done = run.command("status").finish(0)
    job = run.job("long")
    assert row_of(done, "quick/single/0")[1] == "success"
    assert row_of(done, "long/single/0")[1:5] == ["running", job, "gb200-1", "1"]
    assert row_of(done, "last/single/0")[1:5] == ["waiting", "", "", ""]
    assert f"1 running, 1 success, 1 waiting; held by process {run.process.pid} on " in done.words
    assert "submitting as" not in done.words

    run.process.kill()
    run.process.wait()
    done = run.command("status").finish(0)
    assert "1 running, 1 success, 1 waiting; no running process holds this run; as of " in done.words
    assert "UTC; continue with: mbridge resume" in done.words
    assert row_of(done, "long/single/0")[1] == "running"

    sandbox.run("scancel", job)
    run.command("resume").finish(1)
    done = run.command("status", "--events").finish(0)
    assert "1 failed, 2 success; " in done.words
    assert "mbridge resume" not in done.words
    assert "the job ended as CANCELLED" in done.words
    events = [line for line in done.stdout.splitlines() if " long/single/0: " in line]
    texts = [line.split(" long/single/0: ")[1] for line in events]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}", events[0])
    assert texts[0].startswith("attempt 1: submitting as ")
    assert texts[1] == f"attempt 1: job {job}"
    assert texts[-1] == "verdict: failed"
    assert "attempt 1: RUNNING" in texts


# ---- watch


def test_watch_follows_a_run_that_another_process_drives(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any
) -> None:
    run = start_run(sandbox, [stand_in_test("quick"), stand_in_test("long", LONG, run='time_limit = "1:00:00"')])
    until("the quick one's end", lambda: run.query("SELECT 1 FROM runs WHERE verdict = 'success'"))
    wait_for_running(run, 1, until)
    watching, leaving = run.command("watch"), run.command("watch")
    for each in (watching, leaving):
        each.wait_for_words("1 done, 1 running; ")
    leaving.send(signal.SIGINT)
    assert "the run goes on; watch it again with: mbridge watch" in leaving.finish(0).words
    assert run.process.poll() is None

    run.process.kill()
    run.process.wait()
    assert watching.process.poll() is None, "its job goes on"
    resumed = run.command("resume")
    until("a driver", lambda: "held by process" in run.command("status").finish(0).words)
    another = run.command("watch")
    sandbox.run("scancel", run.job("long"))
    resumed.finish(1)
    for done in (watching.finish(0), another.finish(0), run.command("watch").finish(0)):
        assert "1 success, 1 failed, 0 skipped, 0 rejected" in done.words
        assert re.search("failed: long/single/0: .*? CANCELLED", done.words), done.words


# ---- cancel


def test_cancel_while_another_process_drives(start_run: Any, stand_in_test: Any, until: Any, sandbox: Any) -> None:
    run = start_run(sandbox, [stand_in_test("long", LONG, args="gb = 8\nmb = [1, 2, 4]")], runner="max_parallel = 2")
    wait_for_running(run, 2, until)
    cancel = run.command("cancel").finish(0, timeout_s=30)
    assert run.process.wait(1) == 143, "the driver was to have ended before"
    run.finish(143)
    assert "interrupted by SIGTERM; running jobs were cancelled" in run.stderr
    assert not sandbox.run("squeue", "--noheader").stdout
    assert {point["verdict"] for point in run.points().values()} == {"cancelled"}
    assert "3 cancelled" in cancel.words
    assert "3 cancelled" in run.words


def test_cancel_of_what_nobody_drives(start_run: Any, stand_in_test: Any, until: Any, sandbox: Any) -> None:
    """The driver was killed: its jobs run on, and `cancel` finds and ends them, running or pending."""
    tests = [stand_in_test("long", LONG, args="gb = 8\nmb = [1, 2, 4]"), stand_in_test("last", run=_after("long"))]
    run = start_run(sandbox, tests, runner="max_parallel = 2")
    wait_for_running(run, 2, until)
    run.process.kill()
    run.process.wait()
    assert len(sandbox.run("squeue", "--noheader", "--array").stdout.splitlines()) == 3
    before = num_jobs_ever(sandbox)
    cancel = run.command("cancel").finish(0, timeout_s=30)
    assert not sandbox.run("squeue", "--noheader").stdout
    assert num_jobs_ever(sandbox) == before
    points = run.points()
    assert {points[key]["job"].get("state") for key in points if key.startswith("long")} == {"INTERRUPTED"}
    assert "4 cancelled" in cancel.words
    again = run.command("cancel").finish(0, timeout_s=30)
    assert "4 cancelled" in again.words


def _after(test_id: str) -> str:
    return f'[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "{test_id}"\n'


@pytest.mark.parametrize("name", ["status", "cancel", "resume"])
def test_a_directory_that_is_no_run(mbridge: Any, tmp_path: Path, sentence: Sentence, name: str) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        done = mbridge(name, directory)
        assert done.returncode == 2
        sentence(done.stderr)
        assert len(done.stderr.splitlines()) == 1


# ---- logs


@pytest.fixture(scope="module")
def retried(new_cluster: Any) -> Any:
    return new_cluster(nodes=3)


def test_logs(start_run: Any, stand_in_test: Any, until: Any, retried: Any, tmp_path: Path, sentence: Sentence) -> None:
    told = {"step_s": 0.3, "only_first": str(tmp_path / "first"), "at": 2, "say": "words for stderr", "hang": 300}
    tests = [stand_in_test("sweep", args="gb = 8\nmb = [1, 2]"), stand_in_test("unlucky", told)]
    run = start_run(retried, tests)
    run.wait_for_step("unlucky", 2)
    node = until("its node", lambda: _node_of(run, "unlucky"))
    retried.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    run.finish(0)
    assert len(run.point("unlucky")["attempts"]) == 2

    whole = run.command("logs", "sweep/mb1/0").finish(0).stdout
    lines = whole.splitlines()
    assert lines[0].startswith("MBRIDGE_RUN ")
    assert lines[-1].startswith("MBRIDGE_STEP ")
    assert '"step": 5,' in lines[-1]
    assert whole == (run.root / "sweep/mb1/0/stdout.txt").read_text()
    for part in ("sweep/mb1", "mb1", "/sweep/mb1/0/"):
        assert run.command("logs", part).finish(0).stdout == whole
    assert run.command("logs", "mb1", "-n", "2").finish(0).stdout.splitlines() == lines[-2:]
    assert run.command("logs", "mb1", "-n", "0").finish(0).stdout == ""
    assert run.command("logs", "mb1", "-n", "1000").finish(0).stdout == whole

    ambiguous = run.command("logs", "sweep").finish(2)
    sentence(ambiguous.stderr)
    unknown = run.command("logs", "unlukky/single/0").finish(2)
    sentence(unknown.stderr)
    assert "unlucky/single/0" in unknown.stderr.partition(";")[2], "it was to suggest the nearest"

    last = run.command("logs", "unlucky").finish(0).stdout
    assert '"step": 5,' in last
    assert run.command("logs", "unlucky", "--attempt", "2").finish(0).stdout == last
    first = run.command("logs", "unlucky", "--attempt", "1").finish(0).stdout
    assert '"step": 2,' in first
    assert '"step": 3,' not in first
    assert "words for stderr" in run.command("logs", "unlucky", "--attempt", "1", "--stderr").finish(0).stdout
    assert "words for stderr" not in run.command("logs", "unlucky", "--stderr").finish(0).stdout
    sentence(run.command("logs", "unlucky", "--attempt", "3").finish(2).stderr)


def _node_of(run: Any, test_id: str) -> str:
    rows = run.query("SELECT status FROM attempts WHERE key LIKE ?", f"{test_id}/%")
    return str(json.loads(rows[0][0])["nodes"]) if rows and rows[0][0] else ""


def test_following_a_log(start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path, sentence: Sentence) -> None:
    told = {"at": 3, "wait_for": str(tmp_path / "go")}
    tests = [stand_in_test("slow", told, steps=8), stand_in_test("never", run=_after("slow"))]
    run = start_run(sandbox, tests)
    run.wait_for_step("slow", 3)
    follow = run.command("logs", "slow", "--follow", "-n", "1")
    follow.wait_for_words('"step": 3,', 20)
    before = run.command("logs", "never").finish(2)
    sentence(before.stderr, time=RUN_TIME)
    (tmp_path / "go").touch()
    run.finish(0)
    follow.wait_for_words('"step": 8,', 10)
    assert follow.process.poll() is None
    follow.send(signal.SIGINT)
    follow.finish(130, timeout_s=5)
    steps = re.findall(r'"step": (\d+),', follow.stdout)
    assert steps == [str(step) for step in range(3, 9)], "each line once, in order"
    assert "error" not in follow.stderr


# ---- resume


@pytest.mark.parametrize(("told", "code"), [({}, 0), ({"exit": 3}, 1)])
def test_resume_of_a_finished_run(
    start_run: Any, stand_in_test: Any, sandbox: Any, told: dict[str, Any], code: int
) -> None:
    run = start_run(sandbox, [stand_in_test("one", told), stand_in_test("other", run='time_limit = "1:00:00"')])
    run.finish(code)
    before, first = num_jobs_ever(sandbox), run.points()
    again = run.command("resume").finish(code)
    assert run.points() == first
    assert num_jobs_ever(sandbox) == before
    assert "1 success, 1 failed" in again.words if code else "2 success" in again.words


def test_resume_needs_the_credentials(
    start_run: Any, mbridge: Any, stand_in_test: Any, until: Any, sandbox: Any, tmp_path: Path, sentence: Sentence
) -> None:
    told = {**LONG, "only_first": str(tmp_path / "first")}
    test = stand_in_test("one", told, args=f'hf_token = "{TOKEN}"', env=f'SOME_API_KEY = "{TOKEN}"')
    run = start_run(sandbox, [test])
    wait_for_running(run, 1, until)
    until("its start", lambda: (tmp_path / "first").exists())
    run.send(signal.SIGINT)
    run.finish(130, timeout_s=60)
    before, root, env = num_jobs_ever(sandbox), run.root, dict(sandbox.env)

    files = contents_of(root)
    missing = mbridge("resume", root, env=env)
    assert missing.returncode == 2
    sentence(missing.stderr, time=RUN_TIME)
    missing = mbridge("resume", root, env={**env, "HF_TOKEN": TOKEN})
    assert missing.returncode == 2
    sentence(missing.stderr, time=RUN_TIME)
    assert contents_of(root) == files
    assert num_jobs_ever(sandbox) == before

    done = mbridge("resume", root, env={**env, "HF_TOKEN": TOKEN, "SOME_API_KEY": TOKEN})
    assert done.returncode == 0, done.stdout + done.stderr
    assert num_jobs_ever(sandbox) == before + 1
    assert run.point("one")["verdict"] == "success"
    for path in root.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in done.stdout + done.stderr + sandbox.run("scontrol", "show", "job").stdout
