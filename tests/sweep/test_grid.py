"""zip, exclude, include, order and the limits of `[sweep]`."""

import itertools
import time
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.scenario import TestRun, TestScenario
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.build import MOST_REJECTED_ROWS, build_plan
from cloudai_mbridge.plan.run_plan import ScenarioPlan
from cloudai_mbridge.sweep.expand import SweepPoint, SweepSpace, expand, find_axes, path_of
from tests.cases import every
from tests.golden import Sentence

BASE = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "num_gpus": 1, "max_steps": 10}


def points(args: dict[str, Any], **sweep: Any) -> list[dict[str, Any]]:
    definition, run = parts(args, sweep)
    return [dict(point.coordinates) for point in expand(definition, run)]


def parts(args: dict[str, Any], sweep: dict[str, Any], **run: Any) -> Any:
    definition = TestDefinition.model_validate(
        {"name": "t", "description": "", "cmd_args": {**BASE, **args}, "sweep": sweep}
    )
    scenario = TestScenario.model_validate({"name": "s", "Tests": [{"id": "t", "test_name": "t", **run}]})
    return definition, scenario.tests[0]


def plan(args: dict[str, Any], sweep: dict[str, Any], **run: Any) -> ScenarioPlan:
    definition, test = parts(args, sweep, **run)
    scenario = TestScenario.model_validate({"name": "s", "Tests": [{"id": "t", "test_name": "t", **run}]})
    loaded = LoadedScenario(scenario, [LoadedTest(test, definition)])
    return build_plan(loaded, LocalSystem(name="l", scheduler="local"))


def test_zipped_axes_vary_together() -> None:
    found = points({"tp": [1, 2], "mb": [1, 4], "gb": [8, 16]}, zip=[["tp", "gb"]])
    assert found == [
        {"tp": 1, "mb": 1, "gb": 8},
        {"tp": 1, "mb": 4, "gb": 8},
        {"tp": 2, "mb": 1, "gb": 16},
        {"tp": 2, "mb": 4, "gb": 16},
    ]


def test_excluded_points_are_left_out() -> None:
    found = points({"tp": [1, 2], "pp": [1, 2], "mb": [1, 2]}, exclude=[{"tp": 2, "pp": 2}, {"mb": [2], "tp": 1}])
    assert found == [
        {"tp": 1, "pp": 1, "mb": 1},
        {"tp": 1, "pp": 2, "mb": 1},
        *({"tp": 2, "pp": 1, "mb": mb} for mb in (1, 2)),
    ]


def test_included_points_come_last_and_may_set_other_arguments() -> None:
    definition, run = parts({"tp": [1, 2]}, {"include": [{"tp": 4, "seq_length": 128}, {"mb": 2}]})
    *_, first, second = expand(definition, run)
    assert (first.args.tp, first.args.seq_length, first.label) == (4, 128, "tp4-seq_length128")
    assert (second.args.tp, second.args.mb, second.label) == (1, 2, "tp1-mb2")


def test_random_order_visits_every_point_once_and_repeatably() -> None:
    axes = {"tp": [1, 2, 3], "pp": [1, 2, 3, 4, 5], "mb": [1, 2, 4, 8]}
    grid, shuffled = points(axes), points(axes, order="random", seed=7)
    assert shuffled != grid
    assert sorted(map(str, shuffled)) == sorted(map(str, grid))
    assert shuffled == points(axes, order="random", seed=7) != points(axes, order="random", seed=8)


@every("size", [1, 2, 3, 97, 100])
def test_random_order_is_complete_for_any_size(size: int) -> None:
    found = points({"gb": list(range(1, size + 1))}, order="random", seed=3)
    assert sorted(point["gb"] for point in found) == list(range(1, size + 1))


def test_a_value_listed_twice_counts_once() -> None:
    assert points({"tp": [1, 2, 1]}) == [{"tp": 1}, {"tp": 2}]


@every(
    "sweep",
    [
        {"zip": [["tp", "cp"]]},
        {"zip": [["tp", "mb"]]},
        {"zip": [["tp"], ["tp"]]},
        {"exclude": [{"pp": 1}]},
        {"exclude": [{}]},
        {"include": [{"nonsense": 1}]},
        {"include": [{"tp": "x"}]},
    ],
)
def test_mistakes_are_named(sentence: Sentence, sweep: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        points({"tp": [1, 2], "mb": [1, 2, 4]}, **sweep)
    sentence(caught)


def test_repeats_and_iterations_multiply() -> None:
    runs = plan({"mb": [1, 2]}, {"repeats": 2}, iterations=3).runs
    assert [(run.label, run.iteration) for run in runs] == [(f"mb{mb}", i) for mb in (1, 2) for i in range(6)]


def test_max_points_stops_and_says_so() -> None:
    found = plan({"mb": [1, 2, 4, 8]}, {"max_points": 2})
    assert [run.label for run in found.runs] == ["mb1", "mb2"]
    assert found.notes == ("test 't': max_points = 2 is reached; 2 points were not looked at",)


def test_gpu_hours_are_kept(sentence: Sentence) -> None:
    found = plan({"mb": [1, 2, 4, 8]}, {"max_gpu_hours": 0.5}, time_limit="00:10:00", iterations=1)
    assert len(found.runs) == 3  # three times ten minutes on one GPU
    assert "max_gpu_hours" in found.notes[0]
    sentence(found.notes[0])
    with pytest.raises(BadInput) as caught:
        plan({"mb": [1, 2]}, {"max_gpu_hours": 0.5})
    sentence(caught)


def test_rejected_points_beyond_a_thousand_are_counted(sentence: Sentence) -> None:
    found = plan({"tp": list(range(2, 32)), "pp": list(range(2, 42))}, {})
    assert found.num_rejected == 30 * 40
    assert len(found.rejected) == MOST_REJECTED_ROWS
    assert found.rule_counts["C01"] == 1200
    sentence(found.notes[0])


def test_the_size_of_a_huge_grid_costs_nothing() -> None:
    definition, run = parts({name: list(range(1, 1001)) for name in ("tp", "pp", "cp", "mb")}, {"order": "random"})
    sweep = SweepSpace(definition, run)
    assert sweep.grid.size == 10**12
    assert len(next(iter(sweep.grid))) == 4


def test_an_included_point_that_is_there_already_runs_once() -> None:
    include = [{"tp": 1}, {"tp": "2"}, {}, {"seq_length": 128}, {"seq_length": 128}, {"tp": 4}, {"tp": 4}]
    found = plan({"tp": [1, 2]}, {"include": include})
    labels = [run.label for run in found.runs] + [point.label for point in found.rejected]
    assert sorted(labels) == ["tp1", "tp1-seq_length128", "tp2", "tp4"]


def test_an_included_point_may_bring_an_excluded_one_back() -> None:
    found = points({"tp": [1, 2]}, exclude=[{"tp": 2}], include=[{"tp": 2}])
    assert found == [{"tp": 1}, {"tp": 2}]


@every("value", ["2", 5, [1, 5]])
def test_an_exclusion_that_matches_nothing_is_a_mistake(sentence: Sentence, value: Any) -> None:
    with pytest.raises(BadInput) as caught:
        points({"tp": [1, 2]}, exclude=[{"tp": value}])
    sentence(caught)


def test_steps_of_an_agent_are_said_to_have_no_effect(sentence: Sentence) -> None:
    definition, test = parts({"mb": [1, 2]}, {})
    definition = definition.model_copy(update={"agent_steps": 1})
    scenario = TestScenario.model_validate({"name": "s", "Tests": [{"id": "t", "test_name": "t"}]})
    found = build_plan(
        LoadedScenario(scenario, [LoadedTest(test, definition)]), LocalSystem(name="l", scheduler="local")
    )
    assert len(found.runs) == 2
    assert "agent_steps" in found.notes[0]
    sentence(found.notes[0])


@pytest.mark.parametrize("exclude", [[], [{"tp": list(range(1, 41))}]])
def test_a_grid_that_is_too_large_to_go_through(
    monkeypatch: pytest.MonkeyPatch, sentence: Sentence, exclude: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr("cloudai_mbridge.sweep.expand.MOST_POINTS", 50)
    axes = {"tp": list(range(1, 41)), "pp": list(range(1, 41))}
    definition, run = parts(axes, {"exclude": exclude})
    with pytest.raises(BadInput) as caught:
        list(SweepSpace(definition, run).grid)
    sentence(caught)
    assert len(plan({**axes, "num_gpus": 1600, "gb": 1600}, {"max_points": 2}).runs) == 2


def _definition(cmd_args: dict[str, Any], **keys: Any) -> TestDefinition:
    data = {"name": "n", "description": "d", "cmd_args": cmd_args, **keys}
    return TestDefinition.model_validate(data)


def _run(**keys: Any) -> TestRun:
    return TestRun.model_validate({"id": "t", "test_name": "n", **keys})


def _points(cmd_args: dict[str, Any], run: TestRun | None = None, **keys: Any) -> list[SweepPoint]:
    return list(expand(_definition(cmd_args, **keys), run or _run()))


def test_scalars_are_one_point() -> None:
    (point,) = _points({"tp": 2}, _run(num_nodes=3))
    assert (point.test_id, point.label, point.args.tp, point.num_nodes) == ("t", "single", 2, 3)
    assert dict(point.coordinates) == {}


def test_axes_come_in_field_order_whatever_the_order_in_the_file() -> None:
    definition = _definition({"mb": [1], "pp": [1], "tp": [1]}, extra_env_vars={"B": ["1"], "A": ["2"]})
    axes = find_axes(definition, _run(num_nodes=[1]))
    assert [path_of(name) for name in axes] == [
        "cmd_args.tp",
        "cmd_args.pp",
        "cmd_args.mb",
        "extra_env_vars.B",
        "extra_env_vars.A",
        "num_nodes",
    ]
    assert list(axes) == ["tp", "pp", "mb", "env.B", "env.A", "num_nodes"]


def test_the_last_axis_varies_fastest() -> None:
    points = _points({"mb": [1, 2], "tp": [4, 8]}, _run(num_nodes=[1, 2]), extra_env_vars={"X": ["a", "b"]})
    seen = [(p.args.tp, p.args.mb, p.env["X"], p.num_nodes) for p in points]
    assert seen == list(itertools.product([4, 8], [1, 2], ["a", "b"], [1, 2]))
    assert [tuple(p.coordinates) for p in points] == [("tp", "mb", "env.X", "num_nodes")] * 16


def test_what_is_no_axis_is_the_same_in_every_point() -> None:
    points = _points({"tp": [1, 2], "gb": 8, "lr": 0.5}, extra_env_vars={"A": "x"})
    assert [(p.args.gb, p.args.lr, dict(p.env)) for p in points] == [(8, 0.5, {"A": "x"})] * 2


def test_a_point_sets_only_what_the_user_set() -> None:
    (point,) = _points({"tp": [2]})
    assert point.args.model_fields_set == {"tp"}
    assert dict(point.coordinates) == {"tp": 2}


def test_a_combination_that_occurs_twice_runs_once() -> None:
    points = _points({"tp": [1, 2, 1], "mb": [1, 1]})
    assert [(p.args.tp, p.args.mb) for p in points] == [(1, 1), (2, 1)]


def test_an_excluded_list_is_one_value() -> None:
    (point,) = _points({"cuda_graph_scope": ["attn", "mlp"]}, dse_excluded_args=["cmd_args.cuda_graph_scope"])
    assert point.args.cuda_graph_scope == ["attn", "mlp"]
    assert dict(point.coordinates) == {}


def test_an_exclusion_takes_in_all_below_it() -> None:
    keys: dict[str, Any] = {"dse_excluded_args": ["cmd_args"]}
    points = _points({"recompute_modules": ["mlp", "moe"]}, _run(num_nodes=[1, 2]), **keys)
    assert [p.num_nodes for p in points] == [1, 2]


def test_an_exclusion_is_a_path_and_no_prefix_of_a_name() -> None:
    assert len(_points({"tp": [1, 2], "pp": [1, 2]}, dse_excluded_args=["cmd_args.t", "tp"])) == 4


@every(
    ("cmd_args", "run", "keys"),
    [
        ({"tp": [1, 2]}, {}, {"dse_excluded_args": ["cmd_args.tp"]}),
        ({}, {"num_nodes": [1, 2]}, {"dse_excluded_args": ["num_nodes"]}),
        ({}, {}, {"dse_excluded_args": ["extra_env_vars.X"], "extra_env_vars": {"X": ["a", "b"]}}),
    ],
)
def test_a_list_that_can_be_no_value_must_not_be_excluded(
    cmd_args: dict[str, Any], run: dict[str, Any], keys: dict[str, Any]
) -> None:
    """An excluded list where only one value has a meaning is a mistake of the user's: say so, do not run with it."""
    with pytest.raises(BadInput):
        _points(cmd_args, _run(**run), **keys)


def test_the_first_points_of_a_huge_grid_come_at_once() -> None:
    names = ["tp", "pp", "cp", "ep", "et", "mb"]
    definition = _definition({name: list(range(1, 101)) for name in names})  # 10^12 points
    started = time.process_time()
    first = list(itertools.islice(expand(definition, _run()), 102))
    assert time.process_time() - started < 2
    assert [first[i].args.mb for i in (0, 99, 100)] == [1, 100, 1]
    assert [first[i].args.et for i in (0, 99, 100)] == [1, 1, 2]


def test_labels_of_a_grid_are_unique() -> None:
    points = _points(
        {"tp": [1, 11], "pp": [1, 12], "lr": [0.1, 0.10001], "task": ["a b", "a_b", "a/b"]},
        extra_env_vars={"X": ["1-2", "1", "", " "], "Y": ["3", "2-3", "-"]},
    )
    assert len(points) == 2 * 2 * 2 * 3 * 4 * 3
    assert len({point.label for point in points}) == len(points)


def test_points_of_different_values_have_different_labels() -> None:
    """profiling_ranks takes a number or a text: 1 and "1" are two points."""
    points = _points({"profiling_ranks": [1, "1"]})
    assert len(points) == 2
    assert len({point.label for point in points}) == 2


@every(
    "keys",
    [
        {"extra_env_vars": {"HF_TOKEN": ["a", "b"]}},
        {"extra_env_vars": {"PROXY": ["http://bob:n0ttobeseen@h", "b"]}},
        {"extra_env_vars": {"A": ["a", "b"]}, "sweep": {"include": [{"env.A": "MY_TOKEN=n0ttobeseen"}]}},
        {"extra_env_vars": {"A": ["a", "b"]}, "sweep": {"exclude": [{"env.A": ["http://bob:n0ttobeseen@h"]}]}},
    ],
)
def test_a_credential_names_no_point(sentence: Sentence, keys: dict[str, Any]) -> None:
    definition = TestDefinition.model_validate({"name": "t", "description": "d", **keys})
    with pytest.raises(BadInput) as refused:
        next(expand(definition, TestRun(id="t", test_name="t")))
    sentence(refused)
    assert "n0ttobeseen" not in str(refused.value)
