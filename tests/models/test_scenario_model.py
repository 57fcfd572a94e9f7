"""The rules of a scenario as a whole: ids, dependencies, time limits."""

from typing import Any

import pytest
from pydantic import ValidationError

from cloudai_mbridge.models.scenario import TestRun, TestScenario, find_cycle
from tests.cases import every
from tests.golden import Sentence


def _scenario(**waits_for: list[str]) -> TestScenario:
    tests = [
        {
            "id": test_id,
            "test_name": "t",
            "dependencies": [{"type": "start_post_comp", "id": other} for other in others],
        }
        for test_id, others in waits_for.items()
    ]
    return TestScenario.model_validate({"name": "s", "Tests": tests})


def test_an_id_may_occur_once(sentence: Sentence) -> None:
    tests = [{"id": test_id, "test_name": "t"} for test_id in ("a", "b", "a")]
    with pytest.raises(ValidationError) as caught:
        TestScenario.model_validate({"name": "s", "Tests": tests})
    sentence(caught)


@every("waits_for", [{"a": ["x"]}, {"a": ["a"]}, {"a": ["b"], "b": ["c"], "c": ["d"], "d": ["b"], "e": []}])
def test_dependencies_have_an_order(sentence: Sentence, waits_for: dict[str, list[str]]) -> None:
    with pytest.raises(ValidationError) as caught:
        _scenario(**waits_for)
    sentence(caught)


def test_a_diamond_is_no_cycle() -> None:
    assert len(_scenario(a=[], b=["a"], c=["a"], d=["b", "c"]).tests) == 4


def test_a_long_chain_of_dependencies_is_no_problem() -> None:
    chain = {str(i): [str(i + 1)] for i in range(3000)} | {"3000": []}
    assert find_cycle(chain) is None


@every("value", ["1y", "h", "1.5h", "1:2:3:4", "-5", "1-", "1-2:3:4:5", "1.5", "10 --wait", True, -30, 1.5])
def test_what_is_no_time_limit(value: Any) -> None:
    with pytest.raises(ValidationError):
        TestRun.model_validate({"id": "a", "test_name": "t", "time_limit": value})


@every(
    ("written", "slurm"),
    [
        *((text, text) for text in ("30", "01:00:00", "1-0", "1-12:30", "1-12:30:59", "100:00:00")),
        *((30, "30"), (0, "0")),  # minutes
        ("90s", "00:01:30"),
        ("10m", "00:10:00"),
        ("1H", "01:00:00"),
        ("25h", "1-01:00:00"),
        ("2d", "2-00:00:00"),
        ("1w", "7-00:00:00"),
        ("10:30", "10:30:00"),  # hours and minutes, unlike in Slurm
        ("", None),
    ],
)
def test_time_limits_of_slurm_and_of_cloudai(written: str | int, slurm: str | None) -> None:
    assert TestRun.model_validate({"id": "a", "test_name": "t", "time_limit": written}).time_limit == slurm


@every("override", [{"id": ""}, {"iterations": 0}, {"nodes": ["a\n#SBATCH --wrap=x"]}, {"num_nodes": ["x"]}])
def test_a_test_run_refuses(override: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TestRun.model_validate({"id": "a", "test_name": "t", **override})


@pytest.mark.parametrize("value", [0, []])
def test_no_nodes_are_not_set_as_in_cloudai(value: Any) -> None:
    assert TestRun.model_validate({"id": "a", "test_name": "t", "num_nodes": value}).num_nodes is None


def test_only_set_definition_keys_are_overrides() -> None:
    run = TestRun(id="a", test_name="t", num_nodes=2, cmd_args={"tp": 1}, time_limit="10")
    assert run.overrides() == {"cmd_args": {"tp": 1}}


def test_a_scenario_needs_a_test() -> None:
    with pytest.raises(ValidationError):
        TestScenario.model_validate({"name": "s", "Tests": []})
