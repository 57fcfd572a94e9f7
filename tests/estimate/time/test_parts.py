from dataclasses import replace

import pytest

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named
from cloudai_mbridge.estimate.memory.layout import Granularity, ParallelLayout, Recompute
from cloudai_mbridge.estimate.time.parts import (
    IdealTimes,
    RecomputeFactors,
    bubble,
    device_of,
    exchange_shares,
    ideal_parts,
    launch_time_s,
    recomputed,
    ring_gb_s,
    stage_shares,
)
from cloudai_mbridge.estimate.time.work import work_of
from tests.cases import every


def parts_of(
    model: Architecture, layout: ParallelLayout, gpu: str = "gb200", precision: Precision = Precision.BF16
) -> IdealTimes:
    device = device_of(gpu_named(gpu), precision)
    assert device is not None
    work = work_of(model, layout.tp, layout.ep, layout.expert_tp)
    return ideal_parts(model, work, layout, device, layout.num_microbatches)


@every(
    ("pp", "vp", "microbatches", "expected"), [(1, 1, 8, 0), (4, 1, 8, 3 / 8), (4, 5, 8, 3 / 40), (16, 8, 32, 15 / 256)]
)
def test_bubble_is_exact(pp: int, vp: int, microbatches: int, expected: float) -> None:
    assert bubble(pp, vp, microbatches) == expected


def test_more_microbatches_idle_less() -> None:
    shares = [bubble(8, 1, microbatches) for microbatches in (8, 16, 64, 512)]
    assert shares == sorted(shares, reverse=True)


def test_matmul_time_is_flops_over_the_peak(dense: Architecture) -> None:
    layout = ParallelLayout(num_gpus=8, mbs=1, gbs=8)
    parts = parts_of(dense, layout)
    work = work_of(dense, 1, 1, 1)
    assert parts.matmul_mlp == work.mlp_flops * dense.seq_length / 2500e12


def test_eight_bits_halve_the_layers_and_not_the_output(dense: Architecture) -> None:
    layout = ParallelLayout(num_gpus=8, mbs=1, gbs=8)
    wide, narrow = parts_of(dense, layout), parts_of(dense, layout, precision=Precision.FP8_MX)
    assert narrow.matmul_mlp == wide.matmul_mlp / 2
    assert (narrow.matmul_output, narrow.attention_core) == (wide.matmul_output, wide.attention_core)


def test_context_parallelism_divides_the_tokens_and_talks(dense: Architecture) -> None:
    alone, shared = ParallelLayout(num_gpus=8, mbs=1, gbs=8), ParallelLayout(num_gpus=8, cp=2, mbs=1, gbs=4)
    assert parts_of(dense, shared).matmul_mlp == parts_of(dense, alone).matmul_mlp / 2
    assert parts_of(dense, alone).cp_comm == 0 < parts_of(dense, shared).cp_comm


def test_communication_is_where_there_are_groups(dense: Architecture) -> None:
    parts = parts_of(dense, ParallelLayout(num_gpus=1, mbs=1, gbs=1))
    assert (parts.tp_comm, parts.cp_comm, parts.ep_nvlink, parts.ep_network, parts.pp_comm) == (0, 0, 0, 0, 0)
    assert (parts.dp_comm, parts.fsdp_comm) == (0, 0)
    assert parts.optimizer > 0


def test_experts_beyond_the_domain_use_the_network(experts: Architecture) -> None:
    layout = ParallelLayout(num_gpus=64, ep=64, etp=1, mbs=1, gbs=64)
    near, far = parts_of(experts, layout), parts_of(experts, layout, "b200")
    assert (near.ep_network, near.launches_network) == (0, 0)
    assert far.ep_network > 0
    assert far.launches_network == far.launches_moe > 0


def test_sharded_weights_travel_in_every_microbatch(dense: Architecture) -> None:
    layout = ParallelLayout(num_gpus=64, mbs=1, gbs=256)
    plain, sharded = parts_of(dense, layout), parts_of(dense, replace(layout, use_megatron_fsdp=True))
    assert plain.fsdp_comm == sharded.dp_comm == 0
    assert sharded.fsdp_comm == pytest.approx(plain.dp_comm * 4 * 6 / 4)


@every(
    ("pp", "pipeline_layout", "expected"),
    [
        (1, None, (1, 1)),
        (4, None, (0.25, 1.0)),
        (4, "Et*20|(t*20|)*2t*20L", (0.25, 1.0)),
        (4, "Et*23|t*20|t*20|t*17L", (23 / 80, 0)),
        (4, "Et*16|t*20|t*20|t*24L", (0.3, 1.0)),
        (3, None, (1 / 3, 1 / 3)),  # nothing splits 80 layers so: taken as balanced
    ],
)
def test_the_slowest_stage_has_the_most_to_do(
    dense: Architecture, pp: int, pipeline_layout: str | None, expected: tuple[float, float]
) -> None:
    layout = ParallelLayout(num_gpus=12, pp=pp, mbs=1, gbs=24, pipeline_layout=pipeline_layout)
    assert stage_shares(dense, work_of(dense, 1, 1, 1), layout) == expected


def test_a_loss_that_takes_the_place_of_a_layer_balances_the_last_stage(dense: Architecture) -> None:
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    model = replace(dense, num_layers=78, **counted)
    shares = stage_shares(model, work_of(model, 1, 1, 1), ParallelLayout(num_gpus=4, pp=4, mbs=1, gbs=4))
    assert shares in ((20 / 78, 0), (19 / 78, 1.0))


def test_a_whole_graph_needs_no_launches(dense: Architecture) -> None:
    layout = ParallelLayout(num_gpus=1, mbs=1, gbs=2)
    work = work_of(dense, 1, 1, 1)
    assert launch_time_s(work, layout, 2) == pytest.approx(2 * 160e-6)
    assert launch_time_s(work, replace(layout, cuda_graph="full"), 2) == 0


def test_no_device_without_figures() -> None:
    assert device_of(gpu_named("cpu"), Precision.BF16) is None
    assert device_of(gpu_named("h100"), Precision.NVFP4) is None


H100, GB200 = gpu_named("h100"), gpu_named("gb200")


@every(
    ("ranks", "stride", "expected"),
    [
        (8, 1, 450),  # a node
        (2, 4, 450),  # two of a node
        (16, 1, 400),  # every adapter of the node carries a ring
        (16, 2, 200),  # four of its ranks in a node
        (16, 8, 50),  # one of its ranks in a node
        (4, 64, 50),
    ],
)
def test_ring_runs_as_fast_as_its_slowest_link(ranks: int, stride: int, expected: float) -> None:
    assert ring_gb_s(H100, ranks, stride) == expected


def test_a_rack_is_one_domain() -> None:
    assert ring_gb_s(GB200, 64, 1) == 900
    assert ring_gb_s(GB200, 128, 1) == 900  # 72 adapters outrun NVLink
    assert ring_gb_s(GB200, 4, 64) == 50


def test_within_the_domain_nothing_crosses_the_network() -> None:
    near, far = exchange_shares(GB200, 64, 8, is_once=True)
    assert far == 0
    assert 7 < near < 8  # nearly every expert is on another rank


def test_tokens_go_to_a_domain_once() -> None:
    _, far = exchange_shares(H100, 64, 8, is_once=True)
    assert 0 < far < 8 * 7 / 8
    assert far == pytest.approx(8 * (1 - (7 / 8) ** 8) * 7 / 8)


def test_tokens_go_to_a_rank_once() -> None:
    near, _ = exchange_shares(H100, 2, 8, is_once=True)
    assert near == pytest.approx((1 - 0.5**8) * 2 * 0.5)


def test_a_plain_dispatcher_sends_every_copy() -> None:
    assert exchange_shares(H100, 8, 4, is_once=False) == (4 * 7 / 8, 0)
    near, far = exchange_shares(H100, 32, 4, is_once=False)
    assert (near, far) == (4 * 7 / 32, 4 * 24 / 32)


@pytest.mark.parametrize("is_once", [True, False])
def test_more_experts_send_more(is_once: bool) -> None:
    sent = [exchange_shares(H100, 32, copies, is_once=is_once) for copies in (1, 2, 4, 8)]
    assert sent == sorted(sent)


def again(model: Architecture, recompute: Recompute, **sizes: int) -> RecomputeFactors:
    return recomputed(model, ParallelLayout(num_gpus=64, recompute=recompute, **sizes))


def test_nothing_recomputed_costs_nothing(dense: Architecture) -> None:
    assert again(dense, Recompute()) == RecomputeFactors(1, 1, 1, 1, 1)


def test_a_whole_forward_is_a_third_more(dense: Architecture) -> None:
    factors = again(dense, Recompute(Granularity.FULL))
    assert factors == pytest.approx(RecomputeFactors(*[4 / 3] * 5))


def test_some_layers_of_every_chunk(dense: Architecture) -> None:
    factors = again(dense, Recompute(Granularity.FULL, method="block", num_layers=1), pp=4, vp=5)
    assert factors.mlp == pytest.approx(1 + 1 / 3 * 20 / 80)


@every(
    ("module", "group"),
    [
        ("core_attn", "core"),
        ("mlp", "mlp"),
        ("shared_experts", "mlp"),
        ("moe", "moe"),
        ("mla_up_proj", "attention"),
        ("layernorm", "other"),
        ("moe_act", "other"),
    ],
)
def test_a_module_costs_its_own_group_only(dense: Architecture, module: str, group: str) -> None:
    factors = again(dense, Recompute(Granularity.SELECTIVE, frozenset({module})))
    assert {name for name, factor in factors._asdict().items() if factor > 1} == {group}
