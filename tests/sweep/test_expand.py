"""The grid of a test: which axes, in which order, each point once, and no more work than is asked for."""

import itertools
import time
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.sweep.expand import SweepPoint, expand, find_axes
from tests.cases import every


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
    assert [axis.path for axis in axes] == [
        "cmd_args.tp",
        "cmd_args.pp",
        "cmd_args.mb",
        "extra_env_vars.B",
        "extra_env_vars.A",
        "num_nodes",
    ]
    assert [axis.name for axis in axes] == ["tp", "pp", "mb", "env.B", "env.A", "num_nodes"]


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
def test_a_credential_names_no_point(keys: dict[str, Any]) -> None:
    definition = TestDefinition.model_validate({"name": "t", "description": "d", **keys})
    with pytest.raises(BadInput, match="is a credential and cannot be") as refused:
        next(expand(definition, TestRun(id="t", test_name="t")))
    assert "n0ttobeseen" not in str(refused.value)
