"""Numbers of nodes that are none, and names of arguments as Megatron has them."""

from typing import Any

import pytest
from pydantic import ValidationError

from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.toml_source import suggest_field
from cloudai_mbridge.plan.checks import notes_on
from tests.cases import every
from tests.golden import Sentence
from tests.runs import loaded_scenario


@every("value", [-1, [-1], [1, 0], [1, -2]])
def test_a_number_of_nodes_is_positive(sentence: Sentence, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        TestRun(id="t", test_name="t", num_nodes=value)
    sentence(caught)


def test_no_nodes_are_unset_as_in_cloudai_and_noted() -> None:
    for run, is_noted in (({"num_nodes": 0}, True), ({"num_nodes": 1}, False), ({}, False)):
        (test,) = loaded_scenario(({"id": "t", **run}, {"cmd_args": {"model_recipe_name": "gpt_tiny"}})).tests
        notes = [note for note in notes_on(test) if "num_nodes" in note]
        assert bool(notes) is is_noted
    assert TestRun(id="t", test_name="t", num_nodes=[]).num_nodes is None


@every(
    ("name", "meant"),
    [
        ("tensor_parallel", "tp"),
        ("tensor_parallel_size", "tp"),
        ("tensor_model_parallel_size", "tp"),
        ("pipeline_parallelism", "pp"),
        ("context_parallel", "cp"),
        ("expert_parallel", "ep"),
        ("expert_tensor_parallel", "et"),
        ("micro_batch", "mb"),
        ("global_batch_size", "gb"),
        ("seq_len", "seq_length"),
        ("layers", "num_layers"),
    ],
)
def test_an_argument_by_other_words(name: str, meant: str) -> None:
    assert suggest_field(name, ResolvedCmdArgs.model_fields) == f"did you mean {meant!r}?"
