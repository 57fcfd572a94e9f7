import pytest

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import Granularity, ParallelLayout, Recompute
from cloudai_mbridge.estimate.time.parts import RecomputeFactors, recomputed
from tests.cases import every


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
