"""Nodes of a group of the system file."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan.checks import resolve_groups, unknown_states
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

PARTITIONS = [{"name": "main", "groups": [{"name": "g", "nodes": ["n[1-4]"]}]}, {"name": "bare"}]
SYSTEM = slurm_system(partitions=PARTITIONS)


def _nodes(*nodes: str, states: Mapping[str, str] | None = None, **keys: Any) -> tuple[list[str], Any]:
    loaded = loaded_scenario(({"id": "t", "nodes": nodes, **keys}, {}))
    run = resolve_groups(loaded, SYSTEM, (lambda partition: states) if states else unknown_states).tests[0].run
    return run.nodes, run.num_nodes


def test_the_first_ones_where_slurm_does_not_answer() -> None:
    assert _nodes("main:g:2") == (["n1", "n2"], 2)
    assert _nodes("main:g:max_avail") == (["n1", "n2", "n3", "n4"], 4)
    assert _nodes("main:g:1", "x[1-2]", "main:g:1") == (["n1", "x1", "x2", "n2"], 4)
    assert _nodes("main:g:2", exclude_nodes=["n[1-2]"]) == (["n3", "n4"], 2)


def test_idle_nodes_first_and_none_out_of_service() -> None:
    states = {"n1": "allocated", "n2": "drained", "n3": "idle", "n4": "completing"}
    assert _nodes("main:g:2", states=states) == (["n3", "n4"], 2)
    assert _nodes("main:g:3", states=states) == (["n3", "n4", "n1"], 3)
    assert _nodes("main:g:max_avail", states=states) == (["n3", "n4"], 2)
    assert _nodes("main:g:1", states={"n1": "idle*", "n2": "idle"}) == (["n2"], 1)


def test_names_of_nodes_stay_as_they_are() -> None:
    assert _nodes("n[1-2]", num_nodes=2) == (["n[1-2]"], 2)


@pytest.mark.parametrize("spec", ["other:g:1", "main:h:1", "bare:g:1", "main:g:5"])
def test_what_is_no_group_is_refused(sentence: Sentence, spec: str) -> None:
    with pytest.raises(BadInput, match="test 't': nodes:") as caught:
        _nodes(spec)
    sentence(caught)


@pytest.mark.parametrize("text", ["main:g", "main:g:all", "main:g:-1", "main:g:0", ":g:1", "main::1"])
def test_the_form_is_checked_when_the_file_is_read(sentence: Sentence, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _nodes(text)
    sentence(caught)


def test_a_list_that_is_not_one_is_found_when_the_file_is_read(sentence: Sentence) -> None:
    with pytest.raises(ValidationError) as caught:
        _nodes("n[1-")
    sentence(caught)
    with pytest.raises(ValidationError) as caught:
        _nodes("n1", exclude_nodes=["n[x]"])
    sentence(caught)


def test_excluded_nodes_are_taken_out_of_named_ones(sentence: Sentence) -> None:
    assert _nodes("n[1-4]", exclude_nodes=["n2"]) == (["n1", "n3", "n4"], 3)
    assert _nodes("n[1-4]", exclude_nodes=["n[2-3]", "n4"], num_nodes=4) == (["n1"], 1)
    with pytest.raises(BadInput, match="test 't': nodes: exclude_nodes") as caught:
        _nodes("n1", exclude_nodes=["n[1-2]"])
    sentence(caught)


@pytest.mark.parametrize(
    "state",
    [
        *("error", "reboot", "blocked", "future", "inval", "perfctrs", "planned", "maint", "boot", "drng", "down"),
        "idle*",
    ],
)
def test_max_avail_takes_free_nodes_only(state: str) -> None:
    states = {"n1": state, "n2": "idle", "n3": "reserved", "n4": "comp"}
    assert sorted(_nodes("main:g:max_avail", states=states)[0]) == ["n2", "n3", "n4"]


def test_too_few_in_service(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        _nodes("main:g:2", states={"n1": "down*", "n4": "idle", "n2": "drained"})
    sentence(caught)


def test_this_machine_has_no_groups(sentence: Sentence) -> None:
    loaded = loaded_scenario(({"nodes": ["a:b:1"]}, {}))
    with pytest.raises(BadInput) as caught:
        resolve_groups(loaded, LocalSystem(name="here", scheduler="local"), unknown_states)
    sentence(caught)
