"""Transformer Engine's layers start from the weights of a CPU's, in every layout."""

import re
from typing import Any

import pytest

from tests.transformer_engine.engine import MODELS, Built, build, configure, gpu, on_one_rank, torch

EP, TP = "expert_model_parallel_size", "tensor_model_parallel_size"
ETP, SP = "expert_tensor_parallel_size", "sequence_parallel"
# Layout -> (ranks, its fields)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {EP: 2}),
    "ep4": (4, {EP: 4}),
    "tp2-ep2-etp1": (2, {TP: 2, SP: True, EP: 2, ETP: 1}),
    "ep2-etp2": (4, {EP: 2, ETP: 2}),
    "tp2-ep2-etp2": (4, {TP: 2, SP: True, EP: 2, ETP: 2}),
    "tp2": (2, {TP: 2}),
    "tp2-sp": (2, {TP: 2, SP: True}),
}
# What a CPU's layers have as a module is in Transformer Engine's a part of the product that follows
NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def name_on_a_cpu(name: str, first_expert: int) -> str:
    """Return what one rank's model of a CPU calls a parameter of a rank with experts from `first_expert` on."""
    for own, theirs in NORMS.items():
        if name.endswith(f".{own}"):
            return name.replace(own, theirs)
    expert = re.search(r"\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc\d)\.weight(\d*)$", name)
    if expert is None:
        return name
    number = first_expert + int(expert[1] or expert[3])
    return f"{name[: expert.start()]}.experts.local_experts.{number}.{expert[2]}.weight"


def shard(whole: torch.Tensor, shape: torch.Size, rank: int, is_gated: bool) -> torch.Tensor:
    """Return this rank's part of a matrix: that of the gate before that of the up projection."""
    for dim, (size, part) in enumerate(zip(whole.shape, shape, strict=True)):
        if size != part:
            halves = whole.chunk(2, dim) if is_gated and dim == 0 else [whole]
            return torch.cat([half.chunk(size // part, dim)[rank] for half in halves], dim)
    return whole


def check(built: Built, model: str) -> None:
    """Compare a rank's weights with those that a CPU has on one rank; only experts may be on another one."""
    whole = on_one_rank(model, with_te=False).weights
    ep = built.config.model.expert_model_parallel_size
    first_expert = built.ranks["ep"] * MODELS[model].get("num_moe_experts", 0) // ep
    compared = set()
    for name, weight in built.weights.items():
        own = name_on_a_cpu(name, first_expert)
        rank = built.ranks["etp" if ".experts." in name else "tp"]
        assert weight.equal(shard(whole[own], weight.shape, rank, "linear_fc1" in name)), name
        compared.add(own)
    experts = {name for name in whole if ".local_experts." in name}
    assert whole.keys() - compared <= experts
    assert len(experts & compared) == len(experts) // ep


@pytest.mark.parametrize("model", MODELS)
def test_on_one_rank(model: str) -> None:
    check(on_one_rank(model, with_te=True), model)


PAIRS = [
    (layout, model)
    for layout, (_, fields) in LAYOUTS.items()
    for model in MODELS
    if EP not in fields or "num_moe_experts" in MODELS[model]
]


@pytest.mark.parametrize(("layout", "model"), PAIRS)
def test_in_a_layout(layout: str, model: str) -> None:
    """Every rank has its part of the model that one rank of a CPU has, whatever the layers."""
    ranks, fields = LAYOUTS[layout]
    for rank in range(ranks):
        with gpu():
            check(build(configure(model, **fields), rank, ranks), model)
        if model == "sequential":  # what the others are on a CPU
            check(build(configure(model, **fields), rank, ranks), model)


def test_the_experts_differ() -> None:
    weights = on_one_rank("grouped", with_te=True).weights
    for layer in ("linear_fc1", "linear_fc2"):
        first, *others = [each for name, each in weights.items() if f".experts.{layer}.weight" in name]
        assert not any(first.equal(other) for other in others)
        assert first.float().std().item() == pytest.approx(0.02 if layer == "linear_fc1" else 0.01, rel=0.05)


def test_shards_of_experts_are_marked() -> None:
    """A norm counts on every rank what is marked there, and the rest on the first rank only."""
    ranks, fields = LAYOUTS["ep2-etp2"]
    with gpu():
        built = build(configure("grouped", **fields), 0, ranks)
    for name, parameter in built.model.named_parameters():
        if ".experts." in name:
            assert parameter.tensor_model_parallel
            assert parameter.partition_dim == ("linear_fc2" in name)
