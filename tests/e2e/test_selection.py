"""`mbridge run --only` and `--failed-of` on this machine: a partial run, its reports, and the gate on it."""

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from tests.e2e.test_local_guarantees import LOCAL, kill
from tests.golden import Sentence

POLICY = 'name = "p"\n[history]\nfile = "history.sqlite"\nlast = 9\n'
ARGS = {"args": "gb = 8\nmb = [1, 2]", "steps": 12}


def read(run: Any, name: str) -> str:
    return str((run.root / name).read_text())


def failing_at_first(path: Path) -> dict[str, Any]:
    """Return the behaviour of a training that fails until a file contains another."""
    return {"exit": 1, "file": str(path)}


def test_what_failed_runs_again_and_nothing_else(start_run: Any, stand_in_test: Any, tmp_path: Path) -> None:
    """Also of a run that was stopped at its first failure, and of the run that repeats it."""
    fixed = tmp_path / "fixed.json"
    tests = [stand_in_test("good"), stand_in_test("bad", failing_at_first(fixed)), stand_in_test("late")]
    options = {"runner": "fail_fast = true\nretries = 0", "whole_system": LOCAL}
    first = start_run(None, tests, **options).finish(1)
    assert {key: point["verdict"] for key, point in first.points().items()}["good/single/0"] == "success"

    again = start_run(None, tests, args=("--failed-of", str(first.root)), **options).finish(1)
    assert set(again.points()) == {"bad/single/0", "late/single/0"}
    fixed.write_text("{}")
    last = start_run(None, tests, args=("--failed-of", str(again.root)), **options).finish(0)
    assert set(last.points()) == {"bad/single/0", "late/single/0"}
    assert [point["test_id"] for point in last.report["left_out"]] == ["good"]  # which succeeded before

    nothing = start_run(None, tests, args=("--failed-of", str(last.root)), **options).finish(18)
    assert len(nothing.stderr.splitlines()) == 1
    assert not (nothing.directory / "out").exists()


@pytest.fixture(scope="module")
def partial(start_shared_run: Any, stand_in_test: Any) -> Any:
    """A run of one of two points of a sweep, and of nothing of another test."""
    tests = [stand_in_test("sweep", **ARGS), stand_in_test("other")]
    return start_shared_run(None, tests, whole_system=LOCAL, args=("--only", "mb=2")).finish(0)


def test_every_report_has_what_was_left_out(partial: Any) -> None:
    report, reason = partial.report, "does not match --only mb=2"
    names = {"sweep": "mb1", "other": "single"}
    assert report["left_out"] == [{"test_id": test, "label": label, "reason": reason} for test, label in names.items()]
    assert report["tests"] == ["sweep"]
    assert "2 left out" in partial.words
    for name in ("report.txt", "report.md"):
        assert all(f"{test}/{label}" in read(partial, name) for test, label in names.items())
    suites = ET.fromstring(read(partial, "junit.xml"))
    assert (suites.get("errors"), suites.get("failures"), suites.get("skipped")) == ("0", "0", "2")
    assert {case.get("name") for case in suites.iter("testcase") if case.find("skipped") is not None} == {
        *names.values()
    }


def test_commands_on_a_partial_run(partial: Any) -> None:
    assert "2 points left out: sweep/mb1, other/single" in partial.command("show").finish(0).stdout
    assert "2 left out, 1 success; finished" in partial.command("status").finish(0).stdout
    before = partial.report["left_out"]
    assert partial.command("resume").finish(0).report["left_out"] == before


def test_the_gate_misses_what_was_left_out(start_run: Any, stand_in_test: Any, tmp_path: Path) -> None:
    """With a reference of all points, without one of the point, and unless another report has it."""
    told = {"varies": 0.002}
    tests = [stand_in_test(name, told, steps=12, run="iterations = 3") for name in ("a", "b")]

    def run(*args: str) -> Any:
        return start_run(None, tests, whole_system=LOCAL, args=args).finish(0)

    (tmp_path / "policy.toml").write_text(POLICY)
    history = f"--history={tmp_path}/history.sqlite"
    only_a, only_b = run("--only", "a"), run("--only", "b")

    def gate(first: Any, *others: Any) -> dict[str, Any]:
        roots = [str(other.root) for other in others]
        done = first.command("gate", *roots, "--policy", str(tmp_path / "policy.toml"), "--json").finish()
        return dict(json.loads(done.stdout))

    run("--only", "a").command("history import", history).finish(0)
    alone = gate(only_a)
    assert alone["exit_code"] == 11
    assert {point["point"]: point["verdict"] for point in alone["points"]}["b/single"] == "not run"
    run().command("history import", history).finish(0)
    run("--only", "a").command("history import", history).finish(0)  # b stays a point of the scenario
    (left_out,) = (point for point in gate(only_a)["points"] if point["point"] == "b/single")
    assert (left_out["verdict"], left_out["words"]) == ("not run", ["left out: does not match --only a"])
    verdicts = {point["verdict"] for point in gate(only_a, only_b)["points"]}
    assert len(verdicts) > 0
    assert "not run" not in verdicts


def test_a_run_that_goes_on_has_not_failed(start_run: Any, stand_in_test: Any) -> None:
    """Neither while a process drives it, nor after that was killed; its choice survives."""
    tests = [stand_in_test("one", {"step_s": 0.5}, steps=20), stand_in_test("two")]
    run = start_run(None, tests, whole_system=LOCAL, args=("--only", "one"))
    run.wait_for_step("one", 1)

    def refused(code: int) -> str:
        done = start_run(None, tests, whole_system=LOCAL, args=("--failed-of", str(run.root))).finish(code)
        assert not (done.directory / "out").exists()
        return str(done.stderr)

    assert "is held by process" in refused(5)
    kill(run)
    assert "mbridge resume" in refused(2)
    run = run.resume().finish(0)
    assert [point["test_id"] for point in run.report["left_out"]] == ["two"]
    rest = start_run(None, tests, whole_system=LOCAL, args=("--failed-of", str(run.root))).finish(0)
    assert set(rest.points()) == {"two/single/0"}  # which did not run there


@pytest.mark.parametrize("command", ["run", "dry-run"])
def test_an_expression_without_a_match_writes_nothing(
    start_run: Any, stand_in_test: Any, sentence: Sentence, command: str
) -> None:
    done = start_run(
        None, [stand_in_test("sweep", **ARGS)], whole_system=LOCAL, args=("--only", "mb=3"), command=command
    ).finish(2)
    sentence(done.stderr)
    assert not (done.directory / "out").exists()


def test_the_python_interface_chooses(partial: Any, sentence: Sentence) -> None:
    scenario = mb.load(partial.directory / "scenario.toml", system=partial.directory / "system.toml")
    plan = scenario.plan(only=["mb=2", "other"])
    assert [run.label for run in plan.runs] == ["mb2", "single"]
    assert [point.name for point in plan.left_out] == ["sweep/mb1"]
    rest = scenario.plan(failed_of=mb.Run(partial.root))
    assert [run.label for run in rest.runs] == ["mb1", "single"]
    with pytest.raises(mb.BadInput) as caught:
        scenario.plan(only="pp=1")
    sentence(caught)


def test_plans_of_sweeps_choose(partial: Any, mbridge: Any) -> None:
    files = [f"--system-config={partial.directory}/system.toml", f"--test-scenario={partial.directory}/scenario.toml"]

    def plan(*args: str) -> str:
        return str(mbridge("sweep", "plan", *files, *args).stdout)

    tests = json.loads(plan("--only", "mb=2", "--json"))["tests"]
    found = {test["test_id"]: (test["would_run"], test["left_out"]) for test in tests}
    assert found == {"sweep": (1, 1), "other": (0, 1)}
    rows = csv.DictReader(plan(f"--failed-of={partial.root}", "--format=csv").splitlines())
    assert [row["status"] for row in rows] == ["accepted", "left out", "accepted"]
    assert plan("--only", "mb=3", "--format=csv") == ""


def test_a_search_is_among_the_chosen_points(start_run: Any, stand_in_test: Any, sentence: Sentence) -> None:
    """Of a run that was a search, nothing has failed: slow and untried points are its results."""
    tests = [stand_in_test("sweep", args="gb = 8\nmb = [1, 2, 4]", run='agent = "tune"')]
    run = start_run(None, tests, whole_system=LOCAL, args=("--only", "mb=[12]")).finish(0)
    (search,) = run.report["searches"]
    assert search["points"] == 2
    assert {trial["label"] for trial in search["trials"]} <= {"mb1", "mb2"}
    refused = start_run(None, tests, whole_system=LOCAL, args=("--failed-of", str(run.root))).finish(2)
    sentence(refused.stderr)


@pytest.mark.slurm
def test_an_array_of_chosen_points_on_slurm(cluster: Any, start_run: Any, stand_in_test: Any, tmp_path: Path) -> None:
    """Chosen by coordinate, then by their failure: the array has tasks for these alone."""
    fixed = tmp_path / "fixed.json"
    tests = [stand_in_test("sweep", failing_at_first(fixed), args="gb = 8\nmb = [1, 2, 4, 8]")]
    run = start_run(cluster, tests, runner="retries = 0", args=("--only", "mb=[248]")).finish(1)
    assert {job.partition("_")[2] for job in run.jobs().values()} == {"0", "1", "2"}
    assert {key for key, point in run.points().items() if point["verdict"] == "failed"} == set(run.points())
    fixed.write_text("{}")
    args = ("--failed-of", str(run.root), "--only", "mb=4", "--only", "mb=8")
    again = start_run(cluster, tests, args=args).finish(0)
    assert set(again.jobs()) == {"sweep/mb4/0", "sweep/mb8/0"}
    assert {job.partition("_")[2] for job in again.jobs().values()} == {"0", "1"}
    assert {point["label"] for point in again.report["left_out"]} == {"mb1", "mb2"}
