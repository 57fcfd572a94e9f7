"""FLOPs of a batch: lengths that differ, empty batches, pictures, LoRA, models that count themselves."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.training import flops
from cloudai_mbridge.training.flops import (
    NEW,
    OLD,
    Lengths,
    cost_per_token,
    flops_per_token,
    lora_flops_per_sample,
    num_floating_point_operations,
)
from tests.cases import every

MODELS = {name: architecture(load_recipe(name)) for name in recipe_names()}
TINY = MODELS["gpt_tiny"]


def cfg_of(model: Any, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model=model, **fields)


@every("name", MODELS)
@every("formula", [OLD, NEW])
def test_full_sequences_cost_their_tokens(name: str, formula: str) -> None:
    model = MODELS[name]
    tokens = 3 * model.seq_length
    expected = tokens * flops_per_token(model, formula)
    assert num_floating_point_operations(cfg_of(model), 3, formula=formula) == expected
    squared = tokens * model.seq_length
    assert num_floating_point_operations(cfg_of(model), 3, tokens, squared, formula=formula) == expected


@every("name", MODELS)
def test_an_empty_batch_costs_nothing(name: str) -> None:
    cfg = cfg_of(MODELS[name])
    assert num_floating_point_operations(cfg, 0) == 0
    assert num_floating_point_operations(cfg, 0, 0, 0) == 0
    assert num_floating_point_operations(cfg, 0, 0, 0, num_vision_patches=64) == 0
    assert num_floating_point_operations(cfg, 2, 0, 0) == 0


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=8))
def test_attention_follows_the_squares(lengths: list[int]) -> None:
    """A batch of sequences costs what its sequences cost, each by itself."""
    model = MODELS["qwen3_30b_a3b"]
    total, squared = sum(lengths), sum(length**2 for length in lengths)
    alone = sum(length * flops_per_token(model, seq_length=length) for length in lengths)
    assert num_floating_point_operations(cfg_of(model), len(lengths), total, squared) == pytest.approx(alone, rel=1e-12)


def test_lengths_without_squares_are_taken_as_equal() -> None:
    cfg = cfg_of(TINY)
    assert num_floating_point_operations(cfg, 4, 4 * 32) == 4 * 32 * flops_per_token(TINY, seq_length=32)


@every("name", ["llama3_8b", "deepseek_v3", "nemotron_3_nano"])
def test_sums_are_exact_beyond_floating_point(name: str) -> None:
    model = MODELS[name]
    tokens = 12345 * model.seq_length
    assert num_floating_point_operations(cfg_of(model), 12345) == tokens * flops_per_token(model)


# A model that counts itself


class Counting(SimpleNamespace):
    def _get_num_floating_point_operations(self, batch_size: int) -> int:
        return 1000 * batch_size


class CountingWithStatistics(Counting):
    def _get_num_floating_point_operations_with_runtime_stats(self, **statistics: Any) -> float:
        return float(sum(value for value in statistics.values() if value is not None))


class LoRA:
    """Named as the reference's adapter."""


class CanonicalLoRA:
    """An adapter of another class."""


def test_a_models_own_count_goes_first() -> None:
    own = Counting(**vars_of(TINY))
    assert num_floating_point_operations(cfg_of(own), 3) == 3000
    assert num_floating_point_operations(cfg_of(own, peft=CanonicalLoRA()), 3) == 3000
    assert num_floating_point_operations(cfg_of(own, peft=LoRA()), 3) == num_floating_point_operations(cfg_of(TINY), 3)
    with_statistics = CountingWithStatistics(**vars_of(TINY))
    assert num_floating_point_operations(cfg_of(with_statistics), 1, 20, 300, 0, 4000, 50000) == 54321


def vars_of(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


# Vision

VISION = SimpleNamespace(depth=3, hidden_size=16, intermediate_size=24, spatial_merge_size=2, out_hidden_size=10)


def vision_flops(total: int, squared: int, merged: int, mergers: int = 1, out: int = 10) -> float:
    h, width, joined = 16, 24, 64
    layers = 3 * ((8 * h * h + 4 * h * width) * total + 4 * h * squared)
    return 3 * (layers + mergers * merged * (2 * joined**2 + 2 * joined * out))


def seeing(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars_of(TINY), "vision_config": VISION, **fields})


def seen(model: Any, patches: int = 80) -> int:
    """Return what the pictures of two samples add."""
    blind = num_floating_point_operations(cfg_of(model), 2)
    return num_floating_point_operations(cfg_of(model), 2, num_vision_patches=patches) - blind


def test_equal_pictures() -> None:
    assert seen(seeing()) == vision_flops(80, 2 * 40**2, 2 * 10)
    assert seen(seeing(), patches=0) == 0
    assert seen(TINY) == 0
    thinker = SimpleNamespace(**{**vars_of(TINY), "thinker_config": SimpleNamespace(vision_config=VISION)})
    assert seen(thinker) == vision_flops(80, 3200, 20)


def test_deepstack_merges_further_levels() -> None:
    assert seen(seeing(deepstack_visual_indexes=[5, 11])) == vision_flops(80, 3200, 20, mergers=3)
    own = SimpleNamespace(**vars(VISION), deepstack_visual_indexes=[1])
    assert seen(seeing(vision_config=own)) == vision_flops(80, 3200, 20, mergers=2)


def test_a_tower_of_the_models_width_by_default() -> None:
    bare = SimpleNamespace(depth=3, hidden_size=16, intermediate_size=24)
    assert seen(seeing(vision_config=bare)) == vision_flops(80, 3200, 20, out=TINY.hidden_size)


# LoRA


def test_the_references_rule_for_lora() -> None:
    h, g, a, f, layers, vocab = 8192, 8, 64, 28672, 80, 128256
    frozen = 4000 * layers * h**2 * (12 + 12 * g / a + 18 * f / h + 6 * vocab / (layers * h))
    expected = 2 / 3 * frozen + 12 * layers * h * 900_000
    assert lora_flops_per_sample(MODELS["llama3_70b"], 4000, 900_000) == pytest.approx(expected)


@every("name", MODELS)
def test_frozen_weights_cost_two_thirds(name: str) -> None:
    model = MODELS[name]
    cost = cost_per_token(model, Lengths.fixed(model.seq_length))
    frozen = flops_per_token(model, frozen=True)
    assert frozen == pytest.approx(cost.linear * 4 / 6 + cost.core)
    assert 2 / 3 * cost.total < frozen < cost.total
    assert flops_per_token(model, frozen=True, adapter_weights=100) == frozen + 600


def test_the_general_rule_is_the_references_but_for_its_attention() -> None:
    """The reference counts attention as if it were not causal, and the vocabulary without padding."""
    model = MODELS["llama3_70b"]
    general = flops_per_token(model, frozen=True, seq_length=0)
    assert general == pytest.approx(lora_flops_per_sample(model, tokens=1), rel=1e-9)
    core = flops_per_token(model, frozen=True, seq_length=512) - general
    assert lora_flops_per_sample(model, 0, squared=512) == pytest.approx(2 * core)


def test_removed_names_name_their_successor() -> None:
    for name, successor in (("PackedSamples", "lora_flops_per_sample"), ("VisionPatches", "num_vision_patches")):
        with pytest.raises(ImportError, match=successor):
            getattr(flops, name)
