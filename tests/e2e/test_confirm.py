"""Further runs of a finished run's points on a real cluster: on other nodes, exactly as many, taken up after a kill."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.models.slurm_values import expand_hostlist

pytestmark = pytest.mark.slurm

CONFIRM = """
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from cloudai_mbridge.commands.gate.confirm import confirm
from cloudai_mbridge.commands.console import SteadyConsole
from cloudai_mbridge.commands.run.watch import observer_for
from cloudai_mbridge.errors import MBridgeError
root, repeats, *points = sys.argv[1:]
try:
    directory, _ = confirm(Path(root), points, int(repeats), partial(observer_for, SteadyConsole()))
except MBridgeError as error:
    sys.exit(f"{error.exit_code}: {error}")
print(f"done: {directory}")
"""
POINTS = ["noisy/mb1", "noisy/mb2", "wide/single"]


@dataclass(frozen=True)
class Finished:
    """A run that is over; its directory is not the only one any more."""

    root: Path
    env: dict[str, str]
    report: dict[str, Any]

    @classmethod
    def of(cls, run: Any) -> "Finished":
        return cls(run.finish(0).root, run.env, run.report)


class Confirming:
    """A confirmation under way, in a process of its own."""

    def __init__(self, run: Finished, root: Path, repeats: int, *points: str) -> None:
        self.before = set(root.parent.iterdir())
        self.log = root.parent.with_name(f"{len(self.before)}-{root.name}.log")
        argv = [sys.executable, "-c", CONFIRM, str(root), str(repeats), *points]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, text=True, env=run.env)

    def finish(self) -> "Confirming":
        self.process.wait(600)
        return self

    @property
    def words(self) -> str:
        return self.log.read_text()

    @property
    def root(self) -> Path:
        (new,) = set(next(iter(self.before)).parent.iterdir()) - self.before
        return Path(new)

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.root / "report.json").read_text()))


@pytest.fixture
def confirming() -> Iterator[Callable[..., Confirming]]:
    started: list[Confirming] = []

    def start(run: Finished, root: Path, repeats: int, *points: str) -> Confirming:
        started.append(Confirming(run, root, repeats, *points))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def nodes_of(report: dict[str, Any]) -> dict[str, set[str]]:
    """Return, by point, the nodes that its runs had."""
    found: dict[str, set[str]] = {}
    for point in report["points"]:
        name = f"{point['test_id']}/{point['label']}"
        found.setdefault(name, set()).update(expand_hostlist(point["job"]["nodes"]))
    return found


def jobs_in(root: Path) -> list[tuple[str, int]]:
    """Return (key, attempt) of every job in a directory's journal."""
    with contextlib.closing(sqlite3.connect(f"file:{root}/journal.sqlite?mode=ro", uri=True)) as db:
        return db.execute("SELECT key, number FROM attempts ORDER BY key, number").fetchall()


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=3)


@pytest.fixture(scope="module")
def first(sandbox: Any, start_shared_run: Any, stand_in_test: Any) -> Finished:
    """A finished run: one node's points, repeated, and points on two nodes, on a cluster of three."""
    noisy = stand_in_test("noisy", run="iterations = 2", args="mb = [1, 2]\ngb = 4")
    wide = stand_in_test("wide", num_nodes=2)
    other = stand_in_test("other", run='dependencies = [{ type = "start_post_comp", id = "noisy" }]')
    return Finished.of(start_shared_run(sandbox, [noisy, wide, other], runner="max_parallel = 1"))


def count_jobs(sandbox: Any) -> int:
    listed = sandbox.run("squeue", "--noheader", "--array", "--states=all", "--format=%i").stdout
    return len(listed.split())


@pytest.fixture(scope="module")
def confirmed(first: Finished, sandbox: Any) -> tuple[Confirming, int]:
    """Three more runs of the points that noise has troubled, and how many jobs Slurm got for them."""
    before = count_jobs(sandbox)
    done = Confirming(first, first.root, 3, *POINTS).finish()
    assert f"done: {done.root}" in done.words
    return done, count_jobs(sandbox) - before


def test_exactly_as_many_runs_and_nothing_else(
    first: Finished, confirmed: tuple[Confirming, int], sandbox: Any, nothing_left: Any
) -> None:
    done, num_jobs = confirmed
    expected = [f"noisy/mb{mb}/{number}" for mb in (1, 2) for number in (2, 3, 4)]
    expected += [f"wide/single/{number}" for number in (1, 2, 3)]
    assert jobs_in(done.root) == [(key, 1) for key in expected]
    assert num_jobs == len(expected)
    nothing_left(sandbox)
    assert {point["key"]: point["verdict"] for point in done.report["points"]} == dict.fromkeys(expected, "success")
    for key in expected:
        assert len((done.root / key / "started.txt").read_text().splitlines()) == 1
    assert json.loads((first.root / "report.json").read_text()) == first.report
    assert not list(first.root.glob("noisy/*/2"))


def test_other_nodes_where_there_are_enough(first: Finished, confirmed: tuple[Confirming, int]) -> None:
    """Slurm starts a run on another node while the last one's is still being cleaned up."""
    done, _ = confirmed
    old, new = nodes_of(first.report), nodes_of(done.report)
    notes = done.report["notes"]
    for point in POINTS[:2]:
        assert not old[point] & new[point]
        (note,) = [note for note in notes if point in note and "avoids" in note]
        assert all(node in note for node in old[point])
        assert note.endswith(", where its earlier runs were")
    assert "wide/single: the cluster has no other nodes, so the same ones were used" in notes
    for note in notes:
        assert note in done.words


def test_the_results_are_comparable(first: Finished, confirmed: tuple[Confirming, int]) -> None:
    def facts(of: dict[str, Any]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for point in of["points"]:
            assert point["comparability"]["id"]
            same = [point["args"], point["num_nodes"], point["world_size"], point["num_steps"], point["comparability"]]
            found.setdefault(f"{point['test_id']}/{point['label']}", set()).add(json.dumps(same, sort_keys=True))
        return found

    report = confirmed[0].report
    old, new = facts(first.report), facts(report)
    assert {point: old[point] for point in POINTS} == new
    assert all(len(each) == 1 for each in new.values())
    assert (report["scenario"], report["system"]) == (first.report["scenario"], first.report["system"])


def test_a_drained_cluster_has_no_other_nodes(first: Finished, confirming: Any, sandbox: Any) -> None:
    """Nobody waits for nodes that are out of service when the same ones would do."""
    used = nodes_of(first.report)["noisy/mb1"]
    others = f"nodename={','.join({f'gb200-{number}' for number in (1, 2, 3)} - used)}"
    assert sandbox.run("scontrol", "update", others, "state=drain", "reason=test").returncode == 0
    try:
        report = confirming(first, first.root, 1, "noisy/mb1").finish().report
    finally:
        sandbox.run("scontrol", "update", others, "state=resume")
    assert nodes_of(report)["noisy/mb1"] <= used
    assert "noisy/mb1: the cluster has no other nodes, so the same ones were used" in report["notes"]


def test_a_cluster_of_one_node(new_cluster: Any, start_run: Any, stand_in_test: Any, confirming: Any) -> None:
    run = Finished.of(start_run(new_cluster(nodes=1), [stand_in_test("noisy")]))
    done = confirming(run, run.root, 2, "noisy/single").finish()
    assert [point["verdict"] for point in done.report["points"]] == ["success"] * 2
    assert "noisy/single: the cluster has no other nodes, so the same ones were used" in done.words


def test_on_this_machine(start_run: Any, stand_in_test: Any, confirming: Any, repository: Path) -> None:
    stand_in = repository / "tests/stand_in/training.py"
    system = f'name = "l"\nscheduler = "local"\npython_executable = "{stand_in}"\n'
    run = Finished.of(start_run(None, [stand_in_test("noisy")], whole_system=system))
    done = confirming(run, run.root, 2, "noisy/single").finish()
    assert [(point["key"], point["verdict"]) for point in done.report["points"]] == [
        ("noisy/single/1", "success"),
        ("noisy/single/2", "success"),
    ]
    assert "noisy/single: this is the only machine, so the same one was used" in done.report["notes"]


def test_excluded_nodes_stay_excluded(sandbox: Any, start_run: Any, stand_in_test: Any, confirming: Any) -> None:
    run = Finished.of(start_run(sandbox, [stand_in_test("noisy")]))
    with contextlib.closing(sqlite3.connect(run.root / "journal.sqlite")) as db, db:
        db.execute("INSERT INTO nodes VALUES ('gb200-2', 'pre_test failed', '2026-01-01')")
    done = confirming(run, run.root, 4, "noisy/single").finish()
    assert done.report["excluded_nodes"] == {"gb200-2": "pre_test failed"}
    assert nodes_of(done.report) == {"noisy/single": {"gb200-3"}}


# ---- the driver ends before its jobs do


@pytest.fixture
def slow(sandbox: Any, start_run: Any, stand_in_test: Any, tmp_path: Path) -> tuple[Finished, Path]:
    """A finished run, and a file that its next jobs wait for."""
    told, go = tmp_path / "told", tmp_path / "go"
    run = Finished.of(start_run(sandbox, [stand_in_test("noisy", {"file": str(told)}, steps=5)]))
    told.write_text(json.dumps({"wait_for": str(go)}))
    return run, go


def wait_for_jobs(done: Confirming, until: Any, count: int) -> None:
    def started() -> int:
        assert done.process.poll() is None, done.words
        with contextlib.suppress(ValueError, sqlite3.OperationalError):
            return len(list(done.root.glob("noisy/*/*/started.txt")))
        return 0

    until("the jobs", lambda: started() == count, 30)


def test_resumed_after_a_kill(
    slow: tuple[Finished, Path], confirming: Any, until: Any, mbridge: Any, sandbox: Any, nothing_left: Any
) -> None:
    (run, go), before = slow, count_jobs(sandbox)
    done = confirming(run, run.root, 3, "noisy/single")
    wait_for_jobs(done, until, 3)
    assert "is held by process" in confirming(run, done.root, 1, "noisy/single").finish().words
    done.process.send_signal(signal.SIGKILL)
    done.process.wait()
    assert "3 of 3 runs have not ended" in confirming(run, done.root, 1, "noisy/single").finish().words
    go.touch()
    resumed = mbridge("resume", done.root, env=run.env)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [point["verdict"] for point in done.report["points"]] == ["success"] * 3
    assert jobs_in(done.root) == [(f"noisy/single/{number}", 1) for number in (1, 2, 3)]
    assert count_jobs(sandbox) - before == 3
    nothing_left(sandbox)


def test_interrupted(slow: tuple[Finished, Path], confirming: Any, until: Any, sandbox: Any, nothing_left: Any) -> None:
    run, _ = slow
    done = confirming(run, run.root, 2, "noisy/single")
    wait_for_jobs(done, until, 2)
    os.kill(done.process.pid, signal.SIGINT)
    done.finish()
    assert "130: interrupted by SIGINT; running jobs were cancelled" in done.words
    assert [point["verdict"] for point in done.report["points"]] == ["cancelled"] * 2
    nothing_left(sandbox)
