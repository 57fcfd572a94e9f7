from dataclasses import astuple

import pytest

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.time.work import work_of
from cloudai_mbridge.training.flops import flops_per_token


def test_flops_are_those_of_the_formula(dense: Architecture, experts: Architecture) -> None:
    for model in (dense, experts):
        work = work_of(model, 1, 1, 1)
        flops = work.attention_flops + work.mlp_flops + work.expert_flops + work.output_flops + work.core_flops
        assert flops == pytest.approx(flops_per_token(model), rel=0.01)


def test_tensor_parallelism_divides_the_flops(dense: Architecture) -> None:
    alone, shared = work_of(dense, 1, 1, 1), work_of(dense, 4, 1, 1)
    assert shared.mlp_flops == alone.mlp_flops / 4
    assert shared.core_flops == alone.core_flops / 4
    assert shared.dense_parameters == alone.dense_parameters / 4


def test_tensor_parallelism_divides_one_side_of_a_matmul_only(dense: Architecture) -> None:
    assert work_of(dense, 4, 1, 1).matmul_bytes > work_of(dense, 1, 1, 1).matmul_bytes / 4


def test_expert_parallelism_spreads_experts_and_keeps_the_tokens(experts: Architecture) -> None:
    few, many = work_of(experts, 1, 8, 1), work_of(experts, 1, 32, 1)
    assert few.expert_parameters == 4 * many.expert_parameters
    assert few.num_local_experts == 4 * many.num_local_experts == 94 * 16
    assert few.expert_flops == many.expert_flops


def test_expert_tensor_parallelism_divides_experts(experts: Architecture) -> None:
    whole, parts = work_of(experts, 2, 8, 1), work_of(experts, 2, 8, 2)
    assert parts.expert_parameters == whole.expert_parameters / 2
    assert parts.expert_bytes > whole.expert_bytes


def test_parameters_are_about_those_of_the_name(dense: Architecture, experts: Architecture) -> None:
    assert work_of(dense, 1, 1, 1).dense_parameters == pytest.approx(70.5e9, rel=0.01)
    work = work_of(experts, 1, 1, 1)
    assert work.dense_parameters + work.expert_parameters == pytest.approx(235e9, rel=0.01)


def test_a_dense_model_has_no_experts(dense: Architecture) -> None:
    work = work_of(dense, 1, 1, 1)
    assert (work.expert_flops, work.num_moe, work.routed_bytes, work.scan_bytes, work.sparse_flops) == (0, 0, 0, 0, 0)
    assert all(value >= 0 for value in astuple(work))
