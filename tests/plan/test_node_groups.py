"""Nodes of a group of the system file."""

from collections.abc import Mapping
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import Scenario
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem
from cloudai_mbridge.models.test_definition import MegatronBridgeTestDefinition
from cloudai_mbridge.plan.node_groups import resolve_groups, unknown_states

SYSTEM = SlurmSystem.model_validate(
    {
        "name": "c",
        "scheduler": "slurm",
        "default_partition": "main",
        "partitions": [{"name": "main", "groups": [{"name": "g", "nodes": ["n[1-4]"]}]}, {"name": "bare"}],
    }
)


def _nodes(*nodes: str, states: Mapping[str, str] | None = None, **keys: Any) -> tuple[list[str], Any]:
    scenario = Scenario.model_validate({"name": "s", "Tests": [{"id": "t", "test_name": "n", "nodes": nodes, **keys}]})
    definition = MegatronBridgeTestDefinition(name="n", description="d")
    loaded = LoadedScenario(scenario, [LoadedTest(scenario.tests[0], definition)])
    run = resolve_groups(loaded, SYSTEM, (lambda partition: states) if states else unknown_states).tests[0].run
    return run.nodes, run.num_nodes


def test_the_first_ones_where_slurm_does_not_answer() -> None:
    assert _nodes("main:g:2") == (["n1", "n2"], 2)
    assert _nodes("main:g:max_avail") == (["n1", "n2", "n3", "n4"], 4)
    assert _nodes("main:g:1", "x[1-2]", "main:g:1") == (["n1", "x[1-2]", "n2"], 4)
    assert _nodes("main:g:2", exclude_nodes=["n[1-2]"]) == (["n3", "n4"], 2)


def test_idle_nodes_first_and_none_out_of_service() -> None:
    states = {"n1": "allocated", "n2": "drained", "n3": "idle", "n4": "completing"}
    assert _nodes("main:g:2", states=states) == (["n3", "n4"], 2)
    assert _nodes("main:g:3", states=states) == (["n3", "n4", "n1"], 3)
    assert _nodes("main:g:max_avail", states=states) == (["n3", "n4"], 2)
    assert _nodes("main:g:1", states={"n1": "idle*", "n2": "idle"}) == (["n2"], 1)


def test_names_of_nodes_stay_as_they_are() -> None:
    assert _nodes("n[1-2]", num_nodes=2) == (["n[1-2]"], 2)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("other:g:1", "no partition 'other' in system 'c'; known: main, bare"),
        ("main:h:1", "no group 'h' in partition 'main'; known: g"),
        ("bare:g:1", "no group 'g' in partition 'bare'; known: none"),
        ("main:g", "'main:g' is not PARTITION:GROUP:COUNT"),
        ("main:g:all", "COUNT is a number or 'max_avail'"),
        ("main:g:-1", "is not PARTITION:GROUP:COUNT"),
        ("main:g:0", "nodes to use in the group: 4; ask for fewer"),
        ("main:g:5", "nodes to use in the group: 4; ask for fewer"),
    ],
)
def test_what_is_no_group_is_refused(spec: str, why: str) -> None:
    with pytest.raises(BadInput, match=f"test 't': nodes: .*{why}"):
        _nodes(spec)


def test_too_few_in_service() -> None:
    with pytest.raises(BadInput, match="nodes to use in the group: 1; out of service: n1, n2, n3; ask for fewer"):
        _nodes("main:g:2", states={"n1": "down*", "n4": "idle", "n2": "drained"})


def test_this_machine_has_no_groups() -> None:
    scenario = Scenario.model_validate({"name": "s", "Tests": [{"id": "t", "test_name": "n", "nodes": ["a:b:1"]}]})
    definition = MegatronBridgeTestDefinition(name="n", description="d")
    loaded = LoadedScenario(scenario, [LoadedTest(scenario.tests[0], definition)])
    with pytest.raises(BadInput, match="no partition 'a' in system 'here'"):
        resolve_groups(loaded, LocalSystem(name="here", scheduler="local"), unknown_states)
