"""A run that is moved or copied while its jobs wait, and a node that cannot open a job's files: nothing is lost."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slurm

RUNNER = "settle_s = 3\nunknown_s = 20\nretries = 1"


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=1)  # a job with all its GPUs keeps the others waiting


@pytest.fixture
def held(start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path) -> Any:
    """A run with one job that runs until `go` is written, and three that wait: one alone, two in an array."""
    slow = {"step_s": 0.1, "at": 2, "wait_for": str(tmp_path / "go")}
    tests = [
        stand_in_test("slow", slow, num_gpus=4),
        stand_in_test("single", num_gpus=4, run='time_limit = "1:00:00"'),
        stand_in_test("array", num_gpus=4, args="gb = 8\nmb = [1, 2]"),
    ]
    run = start_run(sandbox, tests, runner=RUNNER)
    run.wait_for_step("slow", 2)
    run.go = tmp_path / "go"
    return run


def test_a_run_that_was_moved_loses_no_point(held: Any, sandbox: Any, until: Any) -> None:
    _wait_for_three(held, sandbox, until)
    old = held.root
    new = old.with_name("moved")
    old.rename(new)
    held.finish(3)
    assert "resume it where it is now" in held.words
    held.go.touch()
    held.resume().finish(0)
    points = held.points()
    assert {key: point["verdict"] for key, point in points.items()} == dict.fromkeys(points, "success")
    assert [key for key in points if len((new / key / "started.txt").read_text().splitlines()) != 1] == []
    until("an empty queue", lambda: not sandbox.run("squeue", "--noheader").stdout.strip())


def test_a_copy_does_not_act_on_the_jobs_of_its_original(held: Any, sandbox: Any, until: Any) -> None:
    _wait_for_three(held, sandbox, until)
    copy = held.directory / "copy"
    shutil.copytree(held.root, copy, symlinks=True)
    for command in ("cancel", "resume"):
        refused = held.command("status").finish()  # in its environment
        refused.start(command, str(copy))
        refused.finish(2)
        assert f"is a copy of {held.root.resolve()}" in refused.words
    held.go.touch()
    held.finish(0)
    assert {point["verdict"] for point in held.points().values()} == {"success"}


def test_a_job_that_cannot_be_launched_is_tried_again(held: Any) -> None:
    """Slurm's 0:53: its output file cannot be opened."""
    (directory,) = held.root.glob("single/*/0")
    (directory / "stdout.txt").mkdir()
    held.go.touch()
    held.finish(0)
    assert held.point("single")["verdict"] == "success"
    attempts = held.query("SELECT number, failure FROM attempts WHERE key LIKE 'single/%' ORDER BY number")
    assert [number for number, _ in attempts] == [1, 2]
    assert "launch" in attempts[0][1]


def _wait_for_three(held: Any, sandbox: Any, until: Any) -> None:
    def found() -> str:
        shown = [sandbox.run(*command) for command in (["squeue"], ["scontrol", "show", "node"])]
        told = [text for each in shown for text in (each.stdout, each.stderr)]
        return "\n".join(["three waiting jobs", *told, held.read_output()])

    shown = ("squeue", "--noheader", "--array", "--states=PENDING", "--Format=JobArrayID:|")
    until(found, lambda: len(sandbox.run(*shown).stdout.split()) == 3)
