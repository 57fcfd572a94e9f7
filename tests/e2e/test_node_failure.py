"""Nodes that die under a job or fail the pre-test are named and used no more; tests begin and end with others."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.models.slurm_values import expand_hostlist

pytestmark = pytest.mark.slurm

QUICK = "SlurmdTimeout=6"  # until a crashed node is taken for down


@pytest.fixture(scope="module")
def four(new_cluster: Callable[..., Any]) -> Any:
    return new_cluster(nodes=4, extra_conf=QUICK)


def test_a_node_that_lacks_the_interpreter_fails_no_point(four: Any, start_run: Any, stand_in_test: Any) -> None:
    """It is the first to be free again, and would get most of the points."""
    text = "slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory"
    told = {"bad_nodes": ["gb200-2"], "say": text, "exit": 2, "step_s": 0.1, "unstarted": True}
    test = stand_in_test("one", told, num_gpus=4, args="gb = 64\nmb = [1, 2, 4, 8]\nseq_length = [64, 128]")
    run = start_run(four, [test]).finish(0)
    assert {point["verdict"] for point in run.points().values()} == {"success"}
    assert list(run.report["excluded_nodes"]) == ["gb200-2"]
    assert "program_missing in one/" in run.report["excluded_nodes"]["gb200-2"]


# What pyxis 0.24 and enroot 4.1 print of a node whose store is full, that lacks a mount, whose image file is damaged
STORE_FULL = """\
slurmstepd: error: pyxis: child 5171 failed with error code: 1
slurmstepd: error: pyxis: failed to create container filesystem for image: /images/nemo.sqsh
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     write_file: failed to write file /raid/pyxis_12.0/libfoo.so: No space left on device
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1"""
NO_MOUNT = """\
slurmstepd: error: pyxis: --container-mounts: source path does not exist: /scratch/data
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1"""
BROKEN_IMAGE = """\
slurmstepd: error: pyxis: child 5171 failed with error code: 1
slurmstepd: error: pyxis: failed to create container filesystem for image: /images/nemo.sqsh
slurmstepd: error: pyxis:     FATAL ERROR: File system corruption detected
slurmstepd: error: pyxis: couldn't start container"""
UNKNOWN = """\
slurmstepd: error: pyxis: words of a later version
slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1"""


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (STORE_FULL, "disk_full"),
        (NO_MOUNT, "container_mount_failed"),
        (BROKEN_IMAGE, "image_broken"),
        (UNKNOWN, "container_failed"),
    ],
    ids=["store_full", "no_mount", "broken_image", "unknown"],
)
def test_a_node_that_cannot_start_a_container_fails_no_point(
    four: Any, start_run: Any, stand_in_test: Any, text: str, failure: str
) -> None:
    """Of two nodes: the other one trains every point."""
    told = {"bad_nodes": ["gb200-2"], "say": text, "exit": 1, "step_s": 0.1, "unstarted": True}
    test = stand_in_test("one", told, num_gpus=4, args="gb = 64\nmb = [1, 2, 4, 8, 16]")
    only_two = 'extra_sbatch_args = ["--exclude=gb200-3,gb200-4"]'
    run = start_run(four, [test], system=only_two, runner="retries = 1").finish(0)
    assert {point["verdict"] for point in run.points().values()} == {"success"}
    assert list(run.report["excluded_nodes"]) == ["gb200-2"]
    assert f"{failure} in one/" in run.report["excluded_nodes"]["gb200-2"]
    failures = {attempt["failure"] for point in run.points().values() for attempt in point["attempts"]}
    assert failures == {failure, ""}


def test_what_no_node_can_start_is_the_applications_failure(four: Any, start_run: Any, stand_in_test: Any) -> None:
    told = {"say": NO_MOUNT, "exit": 1, "unstarted": True}
    wrong = stand_in_test("wrong", told, num_gpus=4, args="gb = 64\nmb = [1, 2, 4]")
    large = stand_in_test("large", num_nodes=4, run='dependencies = [{ type = "start_post_comp", id = "wrong" }]')
    run = start_run(four, [wrong, large], runner="retries = 5").finish(1)
    points = run.points()
    assert {point["verdict"] for key, point in points.items() if key.startswith("wrong/")} == {"failed"}
    assert run.point("large")["verdict"] == "success", "the nodes are sound"
    assert run.report["excluded_nodes"] == {}
    assert "container_mount_failed was the same on every node tried: gb200-1, gb200-2, gb200-3, gb200-4" in run.words
    assert "check that the sources of the mounts exist on every node" in run.words


@pytest.fixture(scope="module")
def crashed(
    four: Any, new_cluster: Any, start_shared_run: Any, stand_in_test: Any, tmp_path_factory: Any, until: Any
) -> dict[str, Any]:
    """A node crashes under two nodes' job: where two others are left, and where they are not."""
    short = tmp_path_factory.mktemp("told") / "short"
    told = {"step_s": 0.5, "file": str(short)}
    two = new_cluster(nodes=2, extra_conf=QUICK)
    after = stand_in_test("after", run='dependencies = [{ type = "start_post_comp", id = "pair" }]')
    pair = stand_in_test("pair", told, steps=100, num_nodes=2, run='nodes = ["gb200-1", "gb200-2"]')
    free = pair.replace('nodes = ["gb200-1", "gb200-2"]', "")
    runs = {
        "enough": start_shared_run(four, [free, after]),
        "too_few": start_shared_run(two, [free, after]),
        "named": start_shared_run(two, [pair.replace('"pair"', '"named"')]),
    }
    first = runs["enough"].wait_for_step("pair")
    runs["too_few"].wait_for_step("pair")
    runs["named"].wait_for_step("named")
    nodes = four.run("squeue", "--noheader", f"--jobs={first}", "--format=%N").stdout.strip()
    assert nodes == "gb200-[1-2]"
    short.write_text(json.dumps({"step_s": 0.02}))
    four.crash("gb200-2")
    two.crash("gb200-2")

    def second() -> str:
        jobs = runs["enough"].query("SELECT job_id FROM attempts WHERE key LIKE 'pair/%' AND number = 2")
        return str(jobs[0][0] or "") if jobs else ""

    job_id = until("a second job", second, 60)
    shown = four.run("scontrol", "show", "job", job_id).stdout
    for run in runs.values():
        run.finish(timeout_s=60)
    return {**runs, "shown": shown, "first": first, "second": job_id}


def test_a_run_on_a_node_that_dies_is_repeated_elsewhere(crashed: dict[str, Any], four: Any, nothing_left: Any) -> None:
    run = crashed["enough"]
    point = run.point("pair")
    assert run.returncode == 0, run.words
    assert point["verdict"] == "success"
    first, second = point["attempts"]
    assert (first["job_id"], second["job_id"]) == (crashed["first"], crashed["second"])
    assert (first["state"], first["failure"], first["nodes"]) == ("NODE_FAIL", "job_node_fail", "gb200-[1-2]")
    assert second["state"] == "COMPLETED"
    assert re.search(r"ExcNodeList=gb200-2\b", crashed["shown"])
    assert "gb200-2" not in expand_hostlist(second["nodes"])
    assert (run.root / point["key"] / "attempt-1" / "stdout.txt").exists()
    assert run.point("after")["job"]["nodes"] != "gb200-2"
    nothing_left(four)


def test_the_node_is_named_everywhere(crashed: dict[str, Any]) -> None:
    run = crashed["enough"]
    assert list(run.report["excluded_nodes"]) == ["gb200-2"]
    assert "job_node_fail in pair/single/0" in run.report["excluded_nodes"]["gb200-2"]
    assert "node gb200-2 was excluded: " in run.report_text
    assert "node gb200-2 is excluded: " in run.words
    assert "node gb200-2 was excluded: " in run.words


def test_too_few_nodes_are_left(crashed: dict[str, Any]) -> None:
    run = crashed["too_few"]
    point = run.point("pair")
    assert run.returncode == 1
    assert (point["verdict"], point["failure"]["id"]) == ("failed", "job_node_fail")
    assert len(point["attempts"]) == 1
    assert "not retried: 1 node is left of the 2 it needs" in run.words
    assert run.point("after")["verdict"] == "success", "one node is enough for it"


def test_the_reason_in_the_report_says_how_many_nodes_are_left(crashed: dict[str, Any]) -> None:
    reasons = " / ".join(crashed["too_few"].point("pair")["reasons"])
    assert "1 node is left of the 2 it needs" in reasons


def test_a_run_that_names_the_dead_node_cannot_go_elsewhere(crashed: dict[str, Any]) -> None:
    run = crashed["named"]
    assert run.returncode == 1
    assert len(run.point("named")["attempts"]) == 1
    assert "not retried: it needs node gb200-2, which is excluded" in run.words


# ---- pre-test

CHECK = """
name = "check"
description = "one node"
test_template_name = "MegatronBridge"
[cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 5
[extra_env_vars]
STAND_IN = {told}
"""


@pytest.fixture
def tests_dir(tmp_path: Path) -> Callable[[Any], str]:
    """Write a directory with the pre-test and return the option that names it."""

    def write(told: Any) -> str:
        (tmp_path / "check.toml").write_text(CHECK.format(told=json.dumps(json.dumps(told))))
        return f"--tests-dir={tmp_path}"

    return write


@pytest.fixture
def healthy(four: Any, crashed: dict[str, Any]) -> Any:
    """The cluster with all its nodes."""
    four.revive("gb200-2")
    four.resume("gb200-2")
    return four


def test_a_node_that_fails_the_pre_test(
    healthy: Any, start_run: Any, stand_in_test: Any, tests_dir: Any, nothing_left: Any
) -> None:
    told = {"bad_nodes": ["gb200-3"], "at": 1, "say": "RuntimeError: this GPU is slow", "exit": 1}
    tests = [stand_in_test(f"t{number}", num_nodes=number) for number in (1, 2, 4)]
    run = start_run(healthy, tests, scenario='pre_test = "check"', args=[tests_dir(told)]).finish(1)
    checks = {point["label"]: point["verdict"] for point in run.report["points"] if point["is_pre_test"]}
    assert checks == {f"gb200-{n}": "failed" if n == 3 else "success" for n in (1, 2, 3, 4)}
    assert list(run.report["excluded_nodes"]) == ["gb200-3"]
    assert "pre_test failed" in run.report["excluded_nodes"]["gb200-3"]
    for number in (1, 2):
        point = run.point(f"t{number}")
        assert point["verdict"] == "success"
        assert "gb200-3" not in expand_hostlist(point["job"]["nodes"])
    assert run.point("t4")["verdict"] == "skipped"
    assert any("3 nodes are left of the 4 it needs" in reason for reason in run.point("t4")["reasons"])
    assert "node gb200-3 was excluded" in run.words
    nothing_left(healthy)


def test_no_node_passes_the_pre_test(
    healthy: Any, start_run: Any, stand_in_test: Any, tests_dir: Any, nothing_left: Any
) -> None:
    tests = [stand_in_test(f"t{number}") for number in range(2)]
    run = start_run(healthy, tests, scenario='pre_test = "check"', args=[tests_dir({"exit": 1})]).finish(1)
    assert [run.point(f"t{number}")["verdict"] for number in range(2)] == ["skipped", "skipped"]
    assert run.point("t0")["attempts"] == []
    assert len(run.report["excluded_nodes"]) == 4
    assert "0 nodes are left of the 1 it needs" in run.words
    nothing_left(healthy)


# ---- tests that begin and end with others


def test_one_that_begins_and_one_that_ends_with_another(
    healthy: Any, start_run: Any, stand_in_test: Any, nothing_left: Any, tmp_path: Path
) -> None:
    main = stand_in_test("main", {"at": 1, "wait_for": str(tmp_path / "go")})
    noise = stand_in_test(
        "noise", {"step_s": 0.2}, steps=1000, run='dependencies = [{ type = "end_post_comp", id = "main" }]'
    )
    with_it = stand_in_test("with_it", run='dependencies = [{ type = "start_post_init", id = "main" }]')
    run = start_run(healthy, [main, noise, with_it])
    run.wait_for_step("with_it", 5)
    run.wait_for_step("noise", 5)
    (tmp_path / "go").touch()
    run.finish(0)
    points = {id_: run.point(id_) for id_ in ("main", "noise", "with_it")}
    assert {point["verdict"] for point in points.values()} == {"success"}
    assert points["noise"]["job"]["state"] == "STOPPED"
    assert 4 < len(points["noise"]["steps"]) < 1000
    assert "main has ended (end_post_comp)" in points["noise"]["job"]["reason"]
    begun, ended = points["with_it"]["job"]["submitted_at"], points["main"]["job"]["ended_at"]
    assert points["main"]["job"]["started_at"] <= begun < ended, "it waits for the start, not for the end"
    nothing_left(healthy)
