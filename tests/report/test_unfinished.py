"""A run that no process holds: its jobs stand where Slurm has them, or where their own files prove it."""

import os
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cloudai_mbridge import pipeline
from cloudai_mbridge.api import open_run
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.report import RunReport, build_report
from cloudai_mbridge.report.read import read_report
from cloudai_mbridge.report.text import render_details
from cloudai_mbridge.runner import Journal
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.schedulers.interface import SUBMITTED, JobClass, JobStatus
from cloudai_mbridge.schedulers.slurm import client
from tests.cases import every
from tests.golden import Sentence
from tests.report.conftest import EMBEDDED, SLURM, ARun, a_log

pytestmark = pytest.mark.process
TOKEN = "0123456789abcdef"
KEY, OTHER = "t/mb1/0", "t/mb2/0"
RUNNING = JobStatus("RUNNING", JobClass.ACTIVE, run_time_s=1.0)
INTERRUPTED = JobStatus("INTERRUPTED", JobClass.CANCELLED, reason="mbridge was stopped")
NAME = "7|{state}|None|n1|{code}|0|2:03|{root}/t/mb1/0//|mbridge-r-t-mb1-0.0123456789abcdef|"


def left_by_its_driver(directory: Path) -> ARun:
    """Return a run of two points, of which the first has a job that has not ended."""
    run = ARun(directory / "s_2026-11-01_02-00-00", EMBEDDED, SLURM)
    (run.root / "driver.lock").touch()
    journal = Journal(run.root / "journal.sqlite")
    journal.intend([(KEY, 1)], TOKEN)
    journal.submitted(KEY, 1, "7")
    journal.saw(KEY, 1, SUBMITTED)
    journal.close()
    return run


def write_files(run: ARun, exit_code: str | None, steps: int) -> None:
    """Write what a job's script and its training write."""
    directory = run.root / KEY
    take_claim(directory, TOKEN, "7")
    (directory / "started.txt").write_text(f"job=7 token={TOKEN} nodes=n1\n")
    (directory / "stdout.txt").write_text(a_log(steps) if steps else "")
    if exit_code is not None:
        (directory / "exit_code.txt").write_text(f"{exit_code}\n")


def slurm_says(directory: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, sacct: str = "exit 1") -> None:
    """Put commands in front of the path: a fake of what cannot be provoked."""
    programs = directory / "programs"
    programs.mkdir(exist_ok=True)
    for name, script in {"squeue": squeue, "sacct": sacct}.items():
        (programs / name).write_text(f"#!/bin/bash\necho {name} >> {directory}/asked\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def observed_report(root: Path) -> RunReport:
    with pipeline.observing(root) as observed:
        return build_report(root, observed)


SILENT, UNKNOWN, REFUSED = "sleep 60", "exit 0", "echo 'squeue: error: no controller' >&2; exit 1"


def listed(state: str, code: str = "0") -> str:
    return f"echo '{NAME.format(state=state, code=code, root='@ROOT')}'"


@every(
    ("squeue", "exit_code", "steps", "verdict", "reason"),
    [
        ("PENDING", None, 0, "unfinished", "job 7: PENDING"),
        ("RUNNING", None, 3, "unfinished", "job 7: RUNNING"),
        ("COMPLETED", "0", 6, "success", ""),
        ("COMPLETED", "0", 3, "failed", "3 of 6 steps are in the log"),
        ("COMPLETED", None, 0, "failed", "0 of 6 steps are in the log"),
        ("TIMEOUT", None, 3, "failed", "the job ended as TIMEOUT"),
        ("NODE_FAIL", None, 3, "unfinished", "to be tried again by: mbridge resume"),
        (UNKNOWN, "0", 6, "success", ""),
        (UNKNOWN, "5", 3, "failed", "exit code 5"),
        (UNKNOWN, None, 6, "unfinished", "left no exit code"),
        (UNKNOWN, None, 0, "unfinished", "job 7: FORGOTTEN"),
        (SILENT, "0", 6, "success", ""),
        (SILENT, "0", 3, "failed", "3 of 6 steps are in the log"),
        (SILENT, None, 6, "unfinished", "job 7: RUNNING (by its own start mark)"),
        (REFUSED, "7", 0, "failed", "exit code 7"),
        (REFUSED, "a lie", 6, "unfinished", "job 7: RUNNING (by its own start mark)"),
    ],
)
def test_every_evidence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    squeue: str,
    exit_code: str | None,
    steps: int,
    verdict: str,
    reason: str,
) -> None:
    monkeypatch.setattr(client, "READER_TIMEOUT_S", 1.0)
    run = left_by_its_driver(tmp_path)
    write_files(run, exit_code, steps)
    script = listed(squeue).replace("@ROOT", str(run.root)) if re.fullmatch("[A-Z_]+", squeue) else squeue
    slurm_says(tmp_path, monkeypatch, script)
    before = {path: path.lstat().st_mtime_ns for path in run.root.rglob("*")}
    report = observed_report(run.root)
    assert [str(point.verdict) for point in report.points[:2]] == [verdict, "unfinished"]
    assert reason in "; ".join(report.points[0].reasons)
    assert report.notes[0].startswith(f"results so far: {int(verdict != 'unfinished')} of 2 runs ended; no running ")
    assert re.search(r"as of (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d UTC", report.notes[0])
    assert report.notes[0].endswith(f"continue with: mbridge resume {run.root}")
    assert ("squeue" in report.notes[0]) == (squeue in (SILENT, REFUSED))
    assert (tmp_path / "asked").read_text().split().count("squeue") == 1
    assert {path: path.lstat().st_mtime_ns for path in run.root.rglob("*")} == before, "a reader writes nothing"
    assert open_run(run.root).report().counts == report.counts


def test_files_of_another_job_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = left_by_its_driver(tmp_path)
    write_files(run, "0", 6)
    (run.root / KEY / "started.txt").write_text("job=8 token=fedcba9876543210 nodes=n1\n")
    slurm_says(tmp_path, monkeypatch, REFUSED)
    assert observed_report(run.root).points[0].reasons == ("job 7: PENDING (just submitted)",)


def test_what_mbridge_stopped_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    """Its job may go on, and the other run was not to be submitted any more."""
    run = left_by_its_driver(tmp_path)
    journal = Journal(run.root / "journal.sqlite")
    journal.stopped()
    journal.ending(KEY, 1, INTERRUPTED)
    journal.close()
    slurm_says(tmp_path, monkeypatch, listed("RUNNING").replace("@ROOT", str(run.root)))
    report = observed_report(run.root)
    assert [str(point.verdict) for point in report.points[:2]] == ["cancelled", "cancelled"]
    sentence(report.points[0].reasons[0])


def test_a_failure_that_is_to_be_tried_again(tmp_path: Path) -> None:
    run = left_by_its_driver(tmp_path)
    journal = Journal(run.root / "journal.sqlite")
    journal.saw(KEY, 1, JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE))
    journal.failed(KEY, 1, "node_failure")
    journal.close()
    point = observed_report(run.root).points[0]
    assert (str(point.verdict), point.reasons) == (
        "unfinished",
        ("attempt 1 failed: node_failure; waits to be tried again",),
    )


def test_an_unanswered_submission_is_looked_for_by_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    run = ARun(tmp_path / "r", EMBEDDED, SLURM)
    journal = Journal(run.root / "journal.sqlite")
    journal.intend([(KEY, 1)], TOKEN)
    journal.close()
    slurm_says(tmp_path, monkeypatch, listed("RUNNING").replace("@ROOT", str(run.root)), sacct="exit 1")
    assert observed_report(run.root).points[0].reasons == ("job 7: RUNNING",)
    slurm_says(tmp_path, monkeypatch, UNKNOWN)
    (reason,) = observed_report(run.root).points[0].reasons
    sentence(reason)
    assert "sacct" not in (tmp_path / "asked").read_text()


def test_a_running_point_runs_until_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver saw it start, and nothing since."""
    run = left_by_its_driver(tmp_path)
    journal = Journal(run.root / "journal.sqlite")
    journal.saw(KEY, 1, RUNNING)
    ago = (datetime.now(UTC) - timedelta(minutes=2)).isoformat(timespec="milliseconds")
    journal._db.execute("UPDATE attempts SET started_at = ? WHERE key = ?", (ago, KEY))
    journal.close()
    with driver_lock(run.root):
        text = render_details(observed_report(run.root).points[0], run.root)
    assert (found := re.search(r"running for (\d+) s", text)) is not None, text
    assert 120 <= int(found[1]) < 600
    slurm_says(tmp_path, monkeypatch, listed("PENDING").replace("@ROOT", str(run.root)))
    (tmp_path / "waiting").mkdir()
    waiting = left_by_its_driver(tmp_path / "waiting")
    assert "for 0 s" not in render_details(observed_report(waiting.root).points[0], waiting.root)


def test_the_time_of_a_driven_run_is_that_of_its_last_poll(tmp_path: Path) -> None:
    run = left_by_its_driver(tmp_path)
    with driver_lock(run.root):
        then = time.time() - 3600
        os.utime(run.root / "driver.lock", (then, then))
        found = pipeline.read_status(run.root)
    assert found.as_of == datetime.fromtimestamp(then, UTC)
    assert f"as of {found.as_of:%H:%M:%S} UTC" in found.driver_text


def test_a_report_without_the_newest_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    """The run was cancelled, reported, and resumed since."""
    run = left_by_its_driver(tmp_path)
    journal = Journal(run.root / "journal.sqlite")
    for key in (KEY, OTHER):
        journal.decided(key, "cancelled", ["mbridge was stopped"])
    pipeline.report(run.root)
    assert read_report(run.root)[0].counts["cancelled"]
    journal.reopen(KEY)
    journal.saw(KEY, 1, INTERRUPTED)
    journal.intend([(KEY, 2)], "fedcba9876543210")
    journal.close()
    with pytest.raises(BadInput, match=r"report\.json") as caught:
        read_report(run.root)
    sentence(caught)
    (run.root / "journal.sqlite").write_bytes(b"x" * 5000)
    assert read_report(run.root)[0].counts["cancelled"], "with a damaged journal it is all there is"
