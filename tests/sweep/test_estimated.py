"""Estimates of a sweep's points are those of the points, one by one."""

from typing import Any

import pytest

from cloudai_mbridge.estimate.point import estimate_point
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.sweep.checked import checked_points
from cloudai_mbridge.sweep.estimated import SweepEstimates
from cloudai_mbridge.sweep.expand import SweepSpace
from tests.cases import every
from tests.estimate.test_headlines import value_of

SYSTEM = SlurmSystem(
    name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpus_per_node=4, gpu_type="gb200"
)
DENSE: dict[str, Any] = {
    "model_recipe_name": ["llama3_8b", "llama3_70b"],
    "num_gpus": [16, 32, 64],
    "tp": [1, 2],
    "pp": [1, 4],
    "cp": 1,
    "vp": [1, 2],
    "mb": [1, 2],
    "gb": [64, 96, 128],
    "seq_length": [2048, 4096],
}
EXPERTS: dict[str, Any] = {
    "model_recipe_name": "qwen3_30b_a3b",
    "num_gpus": [8, 32],
    "tp": [1, 2],
    "pp": 1,
    "cp": 1,
    "ep": [4, 8],
    "et": [1, 2],
    "mb": 1,
    "gb": [32, 64],
    "recompute_num_layers": [1, 4],
    "compute_dtype": ["bf16", "fp8_mx"],
    "first_k_dense_replace": [0, 2],
}
# with presets of the newest release, for some of these sizes
LOOP: dict[str, Any] = {
    "launcher": "embedded",
    "gpu_type": "h100",
    "model_recipe_name": ["llama3_8b", "llama3_70b", "qwen3_30b_a3b"],
    "num_gpus": [8, 16, 24, 64, 128],
    "tp": [1, 2, 4],
    "cp": [1, 2],
    "mb": [1, 2],
    "compute_dtype": ["bf16", "fp32"],
}
INCLUDED = [{"recompute_modules": ["mlp", "core_attn"], "tp": 4}, {"tp": 2, "mb": 4}]


@every("args", [DENSE, EXPERTS, LOOP])
def test_a_sweeps_estimates_are_those_of_its_points(args: dict[str, Any]) -> None:
    data = {"name": "n", "description": "", "cmd_args": args, "sweep": {"include": INCLUDED}}
    definition = TestDefinition.model_validate(data)
    sweep = SweepSpace(definition, TestRun(id="t", test_name="n"))
    estimates, compared = SweepEstimates(sweep, SYSTEM, {}), 0
    for point in checked_points(sweep, SYSTEM):
        if point.violations:
            continue
        head, found = estimates.of(point), estimate_point(estimates.request(point))
        for name in ("peak_memory_gib", "memory_share", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu"):
            theirs = value_of(found, name)
            assert getattr(head, name) == (theirs and pytest.approx(theirs, rel=1e-9)), (name, point.coordinates)
        assert (head.num_gpus, head.gpu) == (found.layout.num_gpus, found.gpu)
        compared += 1
    assert compared > (30 if args is LOOP else 100)
