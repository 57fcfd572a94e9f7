"""`mbridge nodes`: a campaign on the sandbox, killed and resumed, and a look at results."""

import json
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SLOW = "gb200-4"
TOLD = {"step_s": 0.05, "varies": 0.004, "says_s": 0.53, "bad_nodes": [SLOW]}


@pytest.fixture(scope="module")
def many(new_cluster: Any) -> Any:
    return new_cluster(nodes=6)


def nodes_of(run: Any) -> dict[str, str]:
    shown = json.loads(run.command("nodes show", "--json").finish(0).stdout)
    return {node["node"]: node["verdict"] for node in shown["nodes"]}


@pytest.mark.slurm
def test_a_campaign_names_the_slow_node_though_its_driver_is_killed(
    many: Any, start_run: Any, stand_in_test: Any, nothing_left: Any
) -> None:
    test = stand_in_test("check", TOLD, steps=12)
    args = ["--nodes=gb200-[1-6]", "--max-runs-per-node=5"]
    run = start_run(many, [test], args=args, command="nodes test")
    run.wait_for_step("check", 12)
    run.send(signal.SIGKILL)
    run.process.wait()
    run = run.resume().finish(0)
    assert nodes_of(run) == {name: "slow" if name == SLOW else "normal" for name in many.node_names}
    used = [point for point in run.report["points"] if point["attempts"]]
    assert len(used) < 5 * 6, "what is decided is not run again"
    ids = [attempt["job_id"] for point in used for attempt in point["attempts"]]
    assert len(set(ids)) == len(ids)
    page = run.root / "nodes.html"
    table = run.command("nodes show", "--fail-on-slow", f"--html={page}").finish(10).stdout
    assert f'"node":"{SLOW}"' in page.read_text(), "on the map"
    assert f"scontrol update nodename={SLOW} state=drain" in table
    print(run.words, table)
    nothing_left(many)


@pytest.mark.slurm
def test_a_campaign_prints_one_document(many: Any, start_run: Any, stand_in_test: Any, repository: Path) -> None:
    args = ["--nodes=gb200-[1-6]", "--max-runs-per-node=2", "--json"]
    run = start_run(many, [stand_in_test("check", TOLD, steps=12)], args=args, command="nodes test").finish(0)
    found, schema = json.loads(run.stdout), json.loads((repository / "docs/schemas/json/nodes-test.json").read_text())
    jsonschema.validate(found, schema, jsonschema.Draft202012Validator)
    assert {node["node"] for node in found["nodes"]} == set(many.node_names)
    assert f"results: {run.root}" in run.stderr


@pytest.mark.slurm
def test_a_sweep_tells_the_slow_node_by_the_way(many: Any, start_run: Any, stand_in_test: Any) -> None:
    test = stand_in_test("sweep", TOLD, steps=12, run="iterations = 40")
    run = start_run(many, [test]).finish(0)
    assert nodes_of(run)[SLOW] == "slow"
    assert "normal" in nodes_of(run).values()
