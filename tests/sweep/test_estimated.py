"""Estimates of many points: the same as one by one, kept by what they read, and in bounded memory."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cloudai_mbridge.estimate.hardware import gpu_named
from cloudai_mbridge.estimate.headline import Headlines
from cloudai_mbridge.estimate.point import estimate_point
from cloudai_mbridge.estimate.question import Question
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.models.test_definition import MegatronBridgeTestDefinition
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.sweep import CheckedPoint, Sweep, checked_points
from cloudai_mbridge.sweep.estimated import ESTIMATED_BY, SweepEstimates
from cloudai_mbridge.sweep.order import informative

ARGS: dict[str, Any] = {"launcher": "megatron_bridge", "model_recipe_name": "llama3_70b", "num_gpus": 64, "gb": 256}
CLUSTER = SlurmSystem.model_validate(
    {"name": "c", "scheduler": "slurm", "default_partition": "p", "partitions": [{"name": "p"}], "gpus_per_node": 4}
)


def _sweep(args: dict[str, Any], **sweep: Any) -> Sweep:
    data = {"name": "n", "description": "d", "cmd_args": {**ARGS, **args}, "sweep": sweep}
    return Sweep(MegatronBridgeTestDefinition.model_validate(data), TestRun(id="t", test_name="n"))


def _points(sweep: Sweep, system: System = CLUSTER) -> Iterator[CheckedPoint]:
    return (point for point in checked_points(sweep, system) if not point.violations)


def test_a_point_of_a_sweep_is_estimated_as_by_itself() -> None:
    axes = {"tp": [2, 4], "pp": [1, 4], "mb": [1, 2], "compute_dtype": ["bf16", "fp8_mx"], "lr": [0.1, 0.2]}
    sweep = _sweep({**axes, "recompute_modules": ["", "mlp"]}, include=[{"tp": 8, "vp": 5, "pp": 4, "mb": 1}])
    estimates, alone = SweepEstimates(sweep, CLUSTER, {}), Headlines()
    found = [(estimates.of(point), alone.of(estimates.question(point))) for point in _points(sweep)]
    assert len(found) > 20
    for together, single in found:
        assert together == single
        assert together.step_time_s is not None


def test_axes_of_recipe_and_launcher() -> None:
    sweep = _sweep(
        {
            "model_recipe_name": ["llama3_8b", "llama3_70b"],
            "launcher": ["embedded", "megatron_bridge"],
            "gpu_type": "gb200",
        }
    )
    estimates = SweepEstimates(sweep, CLUSTER, {})
    times = [estimates.of(point).peak_memory_gib for point in _points(sweep)]
    assert len(times) == len(set(times)) == 4


class _Recording(ResolvedCmdArgs):
    """Arguments that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ResolvedCmdArgs.model_fields:
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


def test_nothing_else_is_read() -> None:
    """What `SweepEstimates` keeps answers by is what the estimate reads."""
    READ.clear()
    for recipe, launcher in itertools.product(recipe_names(), ("embedded", "megatron_bridge")):
        args = _Recording.model_validate(
            {"model_recipe_name": recipe, "launcher": launcher, "num_gpus": 8, "gb": 32, "mb": 1}
        )
        READ.discard("max_steps")
        estimate_point(Question(load_recipe(recipe), args, gpu_named("gb200")))
    assert "tp" in READ
    assert READ - {"max_steps"} <= ESTIMATED_BY


@pytest.mark.parametrize(
    ("args", "system", "gpu", "why"),
    [
        ({}, CLUSTER, "gb200", ""),  # the upstream launcher's default
        ({"gpu_type": "H100"}, CLUSTER, "h100", ""),
        ({"gpu_type": "h100"}, CLUSTER.model_copy(update={"gpu_type": "b200"}), "h100", ""),
        ({}, CLUSTER.model_copy(update={"gpu_type": "b200"}), "b200", ""),
        ({"launcher": "embedded"}, CLUSTER, None, "neither"),
        ({"launcher": "embedded"}, LocalSystem(name="l", scheduler="local"), None, "neither"),
        ({"gpu_type": "tpu"}, CLUSTER, None, "'tpu' is no GPU"),
        ({"model_recipe_name": "theirs"}, CLUSTER, None, "recipe 'theirs'"),
    ],
)
def test_which_gpu(args: dict[str, Any], system: System, gpu: str | None, why: str) -> None:
    sweep = _sweep({"tp": 4, "pp": 4, **args})
    (point,) = checked_points(sweep, system)
    found = SweepEstimates(sweep, system, {}).of(point)
    assert found.gpu == gpu
    assert why in " ".join(found.why)


def test_the_best_of_every_split_leads_then_every_value() -> None:
    sweep = _sweep({"tp": [1, 2, 4], "pp": [1, 2], "mb": [1, 2, 4], "seq_length": [4096, 8192]})
    estimates = SweepEstimates(sweep, CLUSTER, {})

    def speed(point: CheckedPoint) -> float | None:
        return estimates.of(point).tokens_per_s_per_gpu

    points = list(informative(lambda: checked_points(sweep, CLUSTER), speed))
    everything = list(checked_points(sweep, CLUSTER))
    assert len(points) == len(everything)
    assert {str(p.coordinates) for p in points} == {str(p.coordinates) for p in everything}
    splits = points[:6]
    assert {(p.coordinates["tp"], p.coordinates["pp"]) for p in splits} == set(itertools.product([1, 2, 4], [1, 2]))
    rates = [speed(point) or 0 for point in splits]
    assert rates == sorted(rates, reverse=True)
    for point in splits:
        group = [p for p in _points(sweep) if all(p.coordinates[n] == point.coordinates[n] for n in ("tp", "pp"))]
        assert speed(point) == max(speed(p) or 0 for p in group)
    values = {(name, value) for p in points[: 6 + 3 + 2] for name, value in p.coordinates.items()}
    assert values == {(axis.name, value) for axis in sweep.axes for value in axis.values}


def test_without_predictions_the_first_of_every_split_leads() -> None:
    sweep = _sweep({"tp": [2, 4], "mb": [1, 2]})
    points = informative(lambda: checked_points(sweep, CLUSTER), lambda point: 0.0)
    seen = [tuple(point.coordinates.values()) for point in points]
    assert seen == [(2, 1), (4, 1), (2, 2), (4, 2)]


_PEAK = """
import itertools, resource, sys
from tests.sweep.test_estimated import CLUSTER, SweepEstimates, _sweep, _points
rates = [i / 1000 for i in range(2500)]
sweep = _sweep({"tp": [1, 2, 4, 8], "pp": [1, 2, 4], "mb": [1, 2], "seq_length": [4096, 8192], "lr": rates})
estimates = SweepEstimates(sweep, CLUSTER, {})
for point in itertools.islice(_points(sweep), int(sys.argv[1])):
    estimates.of(point)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _peak_kib(points: int, repository: Any) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(points)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=repository,
    )
    return int(done.stdout)


def test_memory_does_not_grow_with_the_points(repository: Any) -> None:
    assert _peak_kib(100_000, repository) < _peak_kib(10_000, repository) + 10 * 1024
