"""The pre-test: one run per node, on that node alone, before everything else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import LoadedTest, load_scenario
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.build import build_plan
from tests.cases import every
from tests.golden import Sentence
from tests.runs import loaded_scenario, slurm_system

ARGS: dict[str, Any] = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "num_gpus": 4, "max_steps": 10}
LOCAL = LocalSystem(name="here", scheduler="local")


def _slurm(**partition: Any) -> SlurmSystem:
    return slurm_system(gpus_per_node=4, partitions=[{"name": "main", **partition}, {"name": "other", "nodes": ["m1"]}])


def _plan(system: System, *tests: dict[str, Any], pre_test: dict[str, Any] | None = None, **scenario: Any) -> list[Any]:
    """Plan tests given as keys of their entries, after a pre-test of these cmd_args; return the pre-test's runs."""
    loaded = loaded_scenario(*((keys, {"cmd_args": ARGS}) for keys in tests or ({},)), pre_test="check", **scenario)
    check = {"name": "check", "description": "d", "cmd_args": {**ARGS, **(pre_test or {})}}
    first = LoadedTest(TestRun(id="pre_test", test_name="check"), TestDefinition.model_validate(check))
    loaded = replace(loaded, pre_test=first)
    runs = build_plan(loaded, system).runs
    checks = [run for run in runs if run.is_pre_test]
    assert list(runs[: len(checks)]) == checks
    assert len(runs) > len(checks)
    return checks


def test_one_run_per_node() -> None:
    runs = _plan(_slurm(nodes=["gb200-[1-2]", "x9"]))
    assert [(run.key, run.label, run.nodes) for run in runs] == [
        (f"pre_test/{node}/0", node, (node,)) for node in ("gb200-1", "gb200-2", "x9")
    ]
    assert {(run.test_id, run.num_nodes, run.ranks_per_node, run.array) for run in runs} == {("pre_test", 1, 4, "")}


def test_nodes_of_groups() -> None:
    groups = [{"name": "g", "nodes": ["n[1-2]"]}, {"name": "h", "nodes": ["n[2-3]"]}]
    assert [run.label for run in _plan(_slurm(groups=groups))] == ["n1", "n2", "n3"]


def test_the_nodes_that_the_tests_name() -> None:
    system = _slurm(nodes=["n[1-9]"])
    assert [run.label for run in _plan(system, {"nodes": ["n[1-2]"]}, {"nodes": ["n2", "n4"]})] == ["n1", "n2", "n4"]
    assert len(_plan(system, {"nodes": ["n[1-2]"]}, {})) == 9  # the other one may run anywhere


def test_this_machine_is_one_node() -> None:
    (run,) = _plan(LOCAL)
    assert (run.label, run.nodes) == ("localhost", ())


@every(
    ("partition", "test", "pre_test"),
    [
        ({}, {}, {}),
        ({"nodes": ["n1"]}, {}, {"tp": [1, 2]}),
        ({"nodes": ["n1"]}, {}, {"num_gpus": 8}),
        ({"nodes": ["n1"]}, {}, {"tp": 3}),
        ({"nodes": ["n1"]}, {"id": "pre_test"}, {}),
    ],
)
def test_what_is_no_pre_test_is_refused(
    sentence: Sentence, partition: dict[str, Any], test: dict[str, Any], pre_test: dict[str, Any]
) -> None:
    with pytest.raises(BadInput) as caught:
        _plan(_slurm(**partition), test, pre_test=pre_test)
    sentence(caught)


def test_a_budget_counts_it(sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"test 'pre_test': runner\.max_gpu_hours") as caught:
        _plan(_slurm(nodes=["n1"]), {"time_limit": "5"}, runner={"max_gpu_hours": 1.0})
    sentence(caught)


def test_without_one_there_is_none() -> None:
    plan = build_plan(loaded_scenario(({}, {"cmd_args": ARGS})), LOCAL)
    assert [run.is_pre_test for run in plan.runs] == [False]


# Where it is found


def _files(directory: Path, name: str) -> tuple[Path, Path]:
    tests = directory / "tests"
    tests.mkdir()
    (tests / "check.toml").write_text(
        'name = "check"\ndescription = "d"\ntest_template_name = "MegatronBridge"\n'
        '[cmd_args]\nlauncher = "embedded"\nmodel_recipe_name = "gpt_tiny"\n'
    )
    scenario = directory / "scenario.toml"
    scenario.write_text(f'name = "s"\npre_test = "{name}"\n[[Tests]]\nid = "t"\ntest_name = "check"\n')
    return scenario, tests


def test_it_is_a_test_of_the_tests_directory(tmp_path: Path) -> None:
    loaded = load_scenario(*_files(tmp_path, "check"))
    assert loaded.pre_test is not None
    assert (loaded.pre_test.run.id, loaded.pre_test.definition.name) == ("pre_test", "check")


def test_one_that_is_not_there_is_named_with_its_line(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        load_scenario(*_files(tmp_path, "chekc"))
    sentence(caught)
