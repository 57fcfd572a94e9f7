"""The terms add up, nothing is negative, and what is meant to save memory saves it."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Precision
from cloudai_mbridge.estimate.memory.estimate import NOTHING, TERMS, Assumptions, memory_per_stage, worst_stage
from cloudai_mbridge.estimate.memory.layout import Adapters, Granularity, Implementation, ParallelLayout, Recompute
from cloudai_mbridge.recipes import load_recipe, recipe_names
from tests.golden import Sentence

FULL = Recompute(Granularity.FULL)
MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts")


def model(recipe: str, **changes: Any) -> Architecture:
    return replace(architecture(load_recipe(recipe), mtp_num_layers=0), **changes)


def peak(arch: Architecture, layout: ParallelLayout, assumptions: Assumptions | None = None) -> float:
    return worst_stage(memory_per_stage(arch, layout, assumptions)).total


def layouts(arch: Architecture) -> Iterator[ParallelLayout]:
    for tp, pp, cp, precision in itertools.product((1, 4), (1, 2), (1, 2), Precision):
        ep = 4 if arch.num_moe_experts else 1
        yield ParallelLayout(num_gpus=32, tp=tp, pp=pp, cp=cp, ep=ep, etp=1, gbs=64, precision=precision, mbs=1)
        yield ParallelLayout(num_gpus=32, tp=tp, cp=cp, ep=ep, etp=1, precision=precision, use_megatron_fsdp=True)


@pytest.mark.parametrize("recipe", recipe_names())
def test_terms_add_up(recipe: str) -> None:
    whole = architecture(load_recipe(recipe), mtp_num_layers=0)
    layers = {"hybrid_layer_pattern": whole.hybrid_layer_pattern and "MEM*" * 4, "num_layers": 16}
    if isinstance(whole.moe_layer_freq, tuple):
        layers["moe_layer_freq"] = whole.moe_layer_freq[:16]
    arch = replace(
        whole, **layers, account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False
    )
    for layout in layouts(arch):
        stages = memory_per_stage(arch, layout)
        assert len(stages) == layout.pp
        assert [stage.stage for stage in stages] == list(range(layout.pp))
        assert worst_stage(stages).total == max(stage.total for stage in stages)
        for stage in stages:
            assert tuple(stage.terms) == TERMS
            assert all(size >= 0 for size in stage.terms.values()), stage.terms
            assert stage.total == pytest.approx(sum(stage.terms.values()))
            assert stage.states + stage.activations < stage.total


@pytest.mark.parametrize("implementation", Implementation)
@pytest.mark.parametrize("recipe", ["llama3_8b", "qwen3_30b_a3b", "deepseek_v3"])
def test_more_ranks_never_need_more(recipe: str, implementation: Implementation) -> None:
    """Per rank: tensor, context, pipeline and data parallelism, at the same micro-batch and number of micro-batches."""
    arch = replace(model(recipe), num_layers=16, moe_layer_freq=1)
    base = ParallelLayout(
        num_gpus=8, ep=8 if arch.num_moe_experts else 1, etp=1, mbs=1, gbs=64, implementation=implementation
    )
    before = peak(arch, base, NOTHING)
    for changes in ({"tp": 2, "gbs": 32}, {"tp": 4, "gbs": 16}, {"cp": 2, "gbs": 32}, {"num_gpus": 64, "gbs": 512}):
        assert peak(arch, replace(base, **changes), NOTHING) <= before * 1.0001, changes
    deeper = [peak(arch, replace(base, num_gpus=8 * pp, pp=pp, gbs=64), NOTHING) for pp in (1, 2, 4, 8)]
    assert deeper == sorted(deeper, reverse=True)


@pytest.mark.parametrize(
    ("recipe", "implementation"),
    [
        *itertools.product(("llama3_8b", "qwen3_30b_a3b", "deepseek_v3"), (Implementation.FUSED, Implementation.TORCH)),
        ("nemotron_3_super", Implementation.FUSED),
    ],
)
def test_recomputing_more_never_needs_more(recipe: str, implementation: Implementation) -> None:
    arch = model(recipe)
    experts = {"ep": 8, "etp": 1} if arch.num_moe_experts else {}
    base = ParallelLayout(num_gpus=8, mbs=2, implementation=implementation, **experts)
    sets = [frozenset(MODULES[:n]) for n in range(len(MODULES) + 1)]
    peaks = [peak(arch, replace(base, recompute=Recompute(Granularity.SELECTIVE, modules))) for modules in sets]
    assert peaks[0] == peak(arch, base)
    if implementation is Implementation.FUSED:
        assert peaks == sorted(peaks, reverse=True)
    assert peak(arch, replace(base, recompute=FULL)) < min(peaks)
    blocks = [
        peak(arch, replace(base, recompute=Recompute(Granularity.FULL, method="block", num_layers=n)))
        for n in (1, 8, 16)
    ]
    assert blocks == sorted(blocks, reverse=True)


def test_what_else_saves_memory() -> None:
    arch, base = model("llama3_8b"), ParallelLayout(num_gpus=8, gbs=64, precision=Precision.FP8_CS)
    savings: list[dict[str, Any]] = [
        {"use_megatron_fsdp": True},
        {"optimizer_offload_fraction": 0.5},
        {"activation_offload_layers": 8},
        {"fp8_param_gather": True},
        {"grad_reduce_in_fp32": False},
        {"fp32_logits": False},
        {"has_fp8_transposes": False},
        {"adapters": Adapters()},
    ]
    for saving in savings:
        assert peak(arch, replace(base, **saving)) < peak(arch, base), saving
    assert peak(arch, replace(base, use_distributed_optimizer=False)) > peak(arch, base)
    assert peak(arch, replace(base, cuda_graph="full")) > peak(arch, base)
    experts = model("qwen3_30b_a3b")
    balanced = ParallelLayout(num_gpus=8, ep=8, etp=1)
    assert peak(experts, replace(balanced, moe_imbalance=1.5)) > peak(experts, balanced)
    assert peak(arch, base) - peak(arch, base, NOTHING) > 0


def test_states_of_a_known_layout() -> None:
    """Bytes per parameter of bf16 training: 2 + 4, and 12 over the data-parallel ranks; with FSDP all over them."""
    arch = model("llama3_8b")
    (stage,) = memory_per_stage(arch, ParallelLayout(num_gpus=8))
    count = stage.parameters
    assert (stage.terms["weights"], stage.terms["gradients"]) == (2 * count, 4 * count)
    assert stage.terms["optimizer"] == pytest.approx(12 * count / 8)
    (sharded,) = memory_per_stage(arch, ParallelLayout(num_gpus=8, use_megatron_fsdp=True))
    assert sharded.terms["weights"] == pytest.approx(2 * count / 8)
    assert sharded.terms["fsdp buffers"] > 0
    for outer, ranks in (("no_shard", 4), ("optim", 8)):  # two instances of four ranks
        copies: dict[str, Any] = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
        (hybrid,) = memory_per_stage(arch, ParallelLayout(num_gpus=8, use_megatron_fsdp=True, **copies))
        assert hybrid.terms["weights"] == pytest.approx(2 * count / 4)
        assert hybrid.terms["gradients"] == pytest.approx(4 * count / 4)
        assert hybrid.terms["optimizer"] == pytest.approx(12 * count / ranks)
    (fp32,) = memory_per_stage(arch, ParallelLayout(num_gpus=8, precision=Precision.FP32))
    assert fp32.terms["optimizer"] == pytest.approx(8 * count / 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_gpus": 6, "tp": 4},
        {"gbs": 12},
        {"pp": 5, "num_gpus": 40},
        {"pp": 2, "vp": 3},
        {"pp": 2, "pipeline_layout": "Et|L"},
        {"tp": 0},
        {"moe_imbalance": 0.5},
        {"optimizer_offload_fraction": 2.0},
    ],
    ids=[
        "num gpus 6 is not",
        "gb 12 is not divisible",
        "32 layers are not divisible",
        "3 virtual stages do not",
        "it has 1 decoder layers",
        "tp 0 is not positive",
        "below the mean",
        "not between 0 and 1",
    ],
)
def test_bad_input(sentence: Sentence, changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        memory_per_stage(model("llama3_8b"), ParallelLayout(**{"num_gpus": 8, **changes}))
    sentence(caught)


def test_what_is_not_modelled(sentence: Sentence) -> None:
    with pytest.raises(BadInput, match="linear-attention"):
        memory_per_stage(model("llama3_8b", linear_attention_freq=2), ParallelLayout())
    with pytest.raises(BadInput) as caught:
        memory_per_stage(model("nemotron_3_nano"), ParallelLayout(implementation=Implementation.TORCH))
    sentence(caught)
