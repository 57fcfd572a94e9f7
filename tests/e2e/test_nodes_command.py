"""`mbridge nodes`: slow nodes of a run on the sandbox."""

import json
from typing import Any

import pytest

from tests.golden import Sentence

SLOW = "gb200-4"
TOLD = {"step_s": 0.05, "varies": 0.004, "says_s": 0.53, "bad_nodes": [SLOW]}


@pytest.fixture(scope="module")
def many(new_cluster: Any) -> Any:
    return new_cluster(nodes=6)


def nodes_of(run: Any) -> dict[str, str]:
    shown = json.loads(run.command("nodes show", "--json").finish(0).stdout)
    return {node["node"]: node["verdict"] for node in shown["nodes"]}


@pytest.mark.slurm
def test_a_sweep_tells_the_slow_node_by_the_way(many: Any, start_run: Any, stand_in_test: Any) -> None:
    test = stand_in_test("sweep", TOLD, steps=12, run="iterations = 40")
    run = start_run(many, [test]).finish(0)
    assert nodes_of(run)[SLOW] == "slow"
    assert "normal" in nodes_of(run).values()
    page = run.root / "nodes.html"
    table = run.command("nodes show", "--fail-on-slow", f"--html={page}").finish(10).stdout
    assert f'"node":"{SLOW}"' in page.read_text(), "on the map"
    assert f"scontrol update nodename={SLOW} state=drain" in table


def test_the_campaigns_of_before_name_what_replaced_them(mbridge: Any, sentence: Sentence) -> None:
    done = mbridge("nodes", "test", "--nodes=gb200-[1-6]", "--max-runs-per-node", "4")
    assert (done.returncode, done.stdout) == (2, "")
    sentence(done.stderr)
