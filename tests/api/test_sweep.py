"""A sweep from Python: load, plan, run, resume, report. Slow parts of the training are a stand-in's."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from cloudai_mbridge.errors import InUse, NothingRan
from cloudai_mbridge.runner.interrupt import Interrupted
from tests.golden import Sentence

pytestmark = pytest.mark.process
Sweep = Callable[..., mb.Scenario]


def test_a_plan_says_what_would_run_and_writes_nothing(sweep: Sweep, tmp_path: Path) -> None:
    scenario = sweep(iterations=3)
    assert (scenario.name, scenario.tests) == ("first", ("layouts",))
    plan = scenario.plan()
    assert [run.label for run in plan.runs] == ["mb2"] * 3 + ["mb4"] * 3
    (rejected,) = plan.rejected
    assert rejected.violations[0].rule_id == "C04"
    rows = [(row["point"], row["status"], row.get("runs"), row["mb"]) for row in plan.table.rows]
    assert rows == [("mb2", "accepted", 3, 2), ("mb4", "accepted", 3, 4), ("mb3", "rejected", None, 3)]
    assert "2 accepted, 1 point rejected" in repr(plan)
    assert not (tmp_path / "results").exists()


def test_a_run_and_its_report(swept: mb.Run, capfd: pytest.CaptureFixture[str]) -> None:
    report = swept.report()
    assert report.succeeded
    assert report.counts["success"] == 10
    assert swept.status().counts == {"success": 10}
    fastest = report.fastest["layouts"]
    assert (fastest.num_good, fastest.num_runs) == (5, 5)
    assert len(report.rankings[0].points) == 2
    assert [row["iteration"] for row in report.table.rows] == [*range(5), *range(5), None]
    counted = [row for row in report.steps.rows if row["counted"]]
    assert len(report.steps.rows) == 10 * 20
    assert {"test", "point", *report.points[0].coordinates} <= {*report.steps.columns} & {*report.table.columns}
    assert {row["point"] for row in report.steps.rows} == {point.label for point in report.points if point.steps}
    assert len(counted) == sum(row.get("step_time_n", 0) for row in report.table.rows)
    assert capfd.readouterr() == ("", "")


def test_a_run_is_found_again(swept: mb.Run, monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(swept.path.parents[1] / "state"))  # where no other test has run
    monkeypatch.chdir(swept.path.parents[1])
    names = ("first", swept.path.name, str(swept.path), swept.path, Path("results", swept.path.name))
    assert [mb.open_run(name) for name in names] == [swept] * len(names)
    with pytest.raises(mb.BadInput) as caught:
        mb.open_run("second")
    sentence(caught)
    with pytest.raises(mb.BadInput) as caught:
        mb.open_run(swept.path.parent)
    sentence(caught)


def test_a_dry_run_is_no_run(swept: mb.Run, sweep: Sweep, tmp_path: Path, mbridge: Any) -> None:
    sweep()
    options = ("--test-scenario", tmp_path / "scenario.toml", "--system-config", tmp_path / "system.toml")
    assert mbridge("dry-run", *options).returncode == 0
    (root,) = (tmp_path / "results").iterdir()
    with pytest.raises(NothingRan):
        mb.open_run(root)


def test_progress_comes_line_by_line_in_any_thread(sweep: Sweep, tmp_path: Path) -> None:
    plan, lines, found = sweep().plan(), [], []

    def run() -> None:
        found.append(plan.run(output_dir=tmp_path / "elsewhere", progress=lines.append))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0].path.parent == tmp_path / "elsewhere"
    assert found[0].report().succeeded
    assert any(line.endswith("[2/2] layouts/mb4/0: success") for line in lines), lines
    assert all(line == line.strip() for line in lines)


def test_progress_that_raises_does_not_end_the_run(sweep: Sweep, sentence: Sentence) -> None:
    def tell(line: str) -> None:
        raise ValueError(line)

    with pytest.warns(RuntimeWarning) as caught:
        run = sweep().plan().run(progress=tell)
    sentence(caught, time=r"\d\d:\d\d:\d\d")
    assert run.report().succeeded


def test_points_that_fail_are_results(sweep: Sweep) -> None:
    run = sweep(exit=3).plan(fail_fast=True).run()
    report = run.report()
    assert not report.succeeded
    assert report.fastest == {}
    assert [row["verdict"] for row in report.table.rows] == ["failed", "skipped", "rejected"]


def test_the_end_is_told_as_by_the_command(sweep: Sweep, tmp_path: Path) -> None:
    sweep()
    path = tmp_path / "scenario.toml"
    asked = f'[runner.on_completion]\ncommand = ["cp", "/dev/stdin", "{tmp_path}/told.json"]\n'
    path.write_text(path.read_text() + asked)
    run = mb.load(path, system=tmp_path / "system.toml").plan().run()
    assert str(run.path) in (tmp_path / "told.json").read_text()


def test_an_interrupted_run_is_resumed(sweep: Sweep, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.endswith("RUNNING"):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as error:
        sweep(wait_for=str(tmp_path / "go")).plan().run(progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    (root,) = (tmp_path / "results").iterdir()
    assert str(root) in error.value.__notes__[0]
    run = mb.open_run(root)
    assert not run.report().succeeded
    (tmp_path / "go").touch()
    assert run.resume().report().counts["success"] == 2


def test_a_run_that_is_under_way_is_seen_and_not_taken(sweep: Sweep, tmp_path: Path, sentence: Sentence) -> None:
    seen: list[Any] = []

    def look(line: str) -> None:
        if line.endswith("RUNNING") and not seen:
            run = mb.open_run(next((tmp_path / "results").iterdir()))
            seen.append((run.status().counts, run.report()))
            with pytest.raises(InUse):
                run.resume()

    assert sweep().plan().run(progress=look).report().succeeded
    so_far = seen[0][1]
    sentence(so_far.notes[0])
    assert so_far.counts["unfinished"]
    assert not so_far.succeeded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_parallel": 0}, "max_parallel: 0:"),
        ({"max_gpu_hours": -1.0}, "max_gpu_hours: -1.0:"),
        ({"fail_fast": "perhaps"}, "fail_fast: 'perhaps':"),
    ],
)
def test_bad_options_are_one_line(sweep: Sweep, sentence: Sentence, options: Any, message: str) -> None:
    with pytest.raises(mb.BadInput) as error:
        sweep().plan(**options)
    assert message in str(error.value)
    sentence(error)
    assert "\n" not in str(error.value)


def test_a_wrong_file_is_the_command_lines_message(tmp_path: Path, sweep: Sweep, mbridge: Any) -> None:
    sweep()
    path = tmp_path / "scenario.toml"
    path.write_text(path.read_text().replace("max_steps", "max_step"))
    with pytest.raises(mb.BadInput, match="max_step") as error:
        mb.load(path, system=tmp_path / "system.toml")
    done = mbridge("dry-run", "--test-scenario", path, "--system-config", tmp_path / "system.toml")
    assert done.stderr.strip() == f"error: {error.value}"
