"""Readers of a run that no process holds: what waits or runs is unfinished, however mbridge has left it."""

import csv
import io
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

on_slurm = pytest.mark.slurm
LOCAL = f"""name = "l"
scheduler = "local"
python_executable = "{Path(__file__).parents[1] / "stand_in" / "training.py"}"
"""
AFTER = '[[Tests.dependencies]]\ntype = "start_post_comp"\nid = "many"\n'


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=1)


def verdicts_of(run: Any) -> Counter[str]:
    points = json.loads(run.command("show", "--json").finish(0).stdout)["points"]
    return Counter(point["verdict"] for point in points)


def wait_for_ends(run: Any, count: int, until: Any) -> None:
    until(f"{count} ended jobs", lambda: len(list(run.root.glob("*/*/*/exit_code.txt"))) >= count)


@on_slurm
@pytest.mark.parametrize("how", ["detach", "hang up", "kill", "quit"])
def test_nothing_is_called_failed(
    start_run: Any, stand_in_test: Any, until: Any, sandbox: Any, tmp_path: Path, how: str
) -> None:
    """One job has ended, one runs, two wait in their array, and one is not submitted."""
    told = {"at": 2, "wait_for": str(tmp_path / "go"), "ledger": str(tmp_path / "ledger")}
    tests = [
        stand_in_test("quick", {"ledger": str(tmp_path / "ledger")}, run='time_limit = "1:00:00"'),
        stand_in_test("many", told, args="gb = 8\nmb = [1, 2, 4]"),
        stand_in_test("last", told, run=AFTER),
    ]
    terminal = {"terminal": (24, 80)} if how in ("hang up", "quit") else {}
    args = ["--detach"] if how == "detach" else []
    run = start_run(sandbox, tests, system='extra_sbatch_args = ["--exclusive"]', args=args, **terminal)
    if how == "detach":
        run.finish(0)
    else:
        run.wait_for_step("many", 2)
        if how == "hang up":
            run.process.close()
        elif how == "quit":
            run.process.type(b"\x1c")
        else:
            run.process.send_signal(signal.SIGKILL)
        run.process.wait(600)
    until("two steps", lambda: '"step": 2,' in run.log("many"))
    wait_for_ends(run, 1, until)
    until(
        "Slurm's word", lambda: "COMPLETED" in sandbox.run("squeue", "--noheader", "--states=all", "--format=%T").stdout
    )

    assert verdicts_of(run) == {"success": 1, "unfinished": 4}
    shown = run.command("show").finish(0).words
    assert "results so far: 1 of 5 runs ended; no running process holds this run; as of " in shown
    assert "0 failed" in shown
    status = run.command("status").finish(0).words
    assert "1 running" in status
    assert "2 pending" in status
    assert "as of " in status
    report = run.command("generate-report --result-dir").finish(4)
    assert "no report is written before the run has ended" in report.words
    assert not (run.root / "report.json").exists()
    for reader in ("nodes show", "compare"):
        other = [str(run.root)] if reader == "compare" else []
        assert "its runs have not ended" in run.command(reader, *other).finish(2).stderr
    exported = run.command("export", "--to", "csv").finish(0)
    assert [row["test"] for row in csv.DictReader(io.StringIO(exported.stdout))] == ["quick"]
    assert exported.stderr.startswith("note: results so far: 1 of 5 runs ended; no running process")
    assert "continue with: mbridge resume" in exported.stderr

    watching = run.command("watch")
    watching.wait_for_words("1 done, 1 running, 2 pending, 1 waiting")
    (tmp_path / "go").touch()
    words = watching.finish(0).words
    assert "no verdict" in words
    assert f"continue with: mbridge resume {run.root}" in words
    assert verdicts_of(run) == {"success": 4, "unfinished": 1}
    run.resume().finish(0)
    assert verdicts_of(run) == {"success": 5}
    assert len((tmp_path / "ledger").read_text().splitlines()) == 5, "no reader has started anything"


@on_slurm
def test_more_at_a_time_on_resume(
    start_run: Any, stand_in_test: Any, until: Any, new_cluster: Any, tmp_path: Path
) -> None:
    """The limit of an array that an earlier process has submitted changes, too; up and down."""
    cluster = new_cluster(nodes=2)
    told = {"at": 2, "wait_for": str(tmp_path / "go")}
    test = stand_in_test("many", told, args="gb = 8\nmb = [1, 2, 4, 8]")
    run = start_run(cluster, [test], runner="max_parallel = 1", args=["--detach"]).finish(0)

    def running() -> int:
        return len(cluster.run("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i").stdout.split())

    until("one job", lambda: running() == 1)
    run.start("resume", str(run.root), "--max-parallel", "3")
    until("three jobs", lambda: running() == 3)
    (tmp_path / "go").touch()
    run.finish(0)
    assert len(set(run.jobs().values())) == 4


def test_a_process_of_this_machine_goes_on(start_run: Any, stand_in_test: Any, until: Any, tmp_path: Path) -> None:
    """Its driver was killed; one that is gone without an exit code is unfinished, too."""
    told = {"at": 2, "wait_for": str(tmp_path / "go")}
    run = start_run(None, [stand_in_test("one", told), stand_in_test("two", told)], whole_system=LOCAL)
    job = run.wait_for_step("one", 2)
    run.process.kill()
    run.process.wait()
    assert verdicts_of(run) == {"unfinished": 2}
    assert f"job {job}: RUNNING" in run.command("show").finish(0).words
    watching = run.command("watch")
    watching.wait_for_words("1 running, 1 waiting")
    (tmp_path / "go").touch()
    assert "continue with: mbridge resume" in watching.finish(0).words
    assert verdicts_of(run) == {"success": 1, "unfinished": 1}
    (run.root / "one/single/0/exit_code.txt").unlink()
    assert verdicts_of(run) == {"unfinished": 2}
    assert "it left no exit code" in run.command("show").finish(0).words
