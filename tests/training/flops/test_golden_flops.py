"""FLOPs per token against the published golden values, from recipes and from the loop's own model classes."""

from dataclasses import replace

import pytest

from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import training_config
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.flops import FLOPS_FORMULA, NEW, OLD, Formula, flops_per_token
from cloudai_mbridge.training.flops.quantities import padded_vocab_size
from cloudai_mbridge.training.models.hybrid_provider import MambaModelProvider
from tests.cases import every
from tests.golden import Sentence

# At the recipe's own sequence length and tensor-parallel size 1 unless said otherwise
GOLDEN = {
    "llama3_8b": 51470401536,
    "llama3_70b": 449222541312,
    "llama31_405b": 2523981152256,  # tp 4
    "deepseek_v3": 259992950784,  # with one multi-token-prediction layer
    "deepseek_v4_flash": 90781470720,
    "gpt_oss_120b": 32631261696,
    "qwen3_235b_a22b": 148034813952,
    "qwen3_30b_a3b": 23006281728,
    "kimi_k2": 204477394944,
    "nemotron_3_nano": 22278094848,
    "nemotron_3_5_lightning": 28147236864,
    "nemotron_3_super": 84727037952,
    "nemotron_3_ultra": 358914981888,
}
TP = {"llama31_405b": 4}
# The published value's window; Megatron-Bridge 0.6's ends a token earlier
EXTRA = {"gpt_oss_120b": {"model.window_size": "[128, 0]"}}


def model_of(name: str) -> Architecture:
    return architecture(load_recipe(name), ResolvedCmdArgs(tp=TP.get(name, 1)), EXTRA.get(name))


@every("name", GOLDEN)
def test_golden_values_to_the_last_digit(name: str) -> None:
    assert flops_per_token(model_of(name)) == GOLDEN[name]


def test_every_large_recipe_has_a_golden_value() -> None:
    tiny = {name for name in recipe_names() if load_recipe(name).family == "tiny"}
    assert set(recipe_names()) - tiny == set(GOLDEN)


def test_the_old_formula_differs_for_gates_without_silu_and_windows_only() -> None:
    old = {name: flops_per_token(model_of(name), OLD) for name in GOLDEN}
    assert old == GOLDEN | {"gpt_oss_120b": 27164491776}


@every("name", ["llama3_8b", "qwen3_30b_a3b", "deepseek_v3", "moe_tiny", "gpt_small"])
def test_the_loops_model_counts_as_the_recipe(name: str) -> None:
    recipe = load_recipe(name)
    args = ResolvedCmdArgs(model_recipe_name=name, launcher="embedded", seq_length=512, num_layers=3, tp=2)
    model = ConfigContainer.from_dict(training_config(recipe, args, {})).model
    for formula in Formula:
        assert flops_per_token(model, formula) == flops_per_token(architecture(recipe, args), formula)


def test_the_loops_hybrid_model_counts_as_the_recipe() -> None:
    arch = model_of("nemotron_3_super")
    model = MambaModelProvider(
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.kv_channels,
        hybrid_layer_pattern=arch.hybrid_layer_pattern,
        mamba_num_heads=arch.mamba_num_heads,
        vocab_size=arch.vocab_size,
        num_moe_experts=arch.num_moe_experts,
        moe_router_topk=arch.moe_router_topk,
        moe_ffn_hidden_size=arch.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=arch.moe_shared_expert_intermediate_size,
        moe_latent_size=arch.moe_latent_size,
        mtp_num_layers=2,
        seq_length=8192,
    )
    assert flops_per_token(model) == GOLDEN["nemotron_3_super"]


def test_formulas_by_name(sentence: Sentence) -> None:
    assert [Formula.named(text) for text in ("new", "old", "megatron-bridge/old")] == [NEW, OLD, OLD]
    assert FLOPS_FORMULA == NEW == "megatron-bridge/new"
    with pytest.raises(ValueError) as caught:
        Formula.named("newest")
    sentence(caught)
    with pytest.raises(ValueError, match="newest"):
        flops_per_token(model_of("gpt_tiny"), "newest")


@every(
    ("tp", "vocabulary", "padded"),
    [(1, 100, 128), (2, 100, 256), (3, 100, 384), (4, 100, 512), (1, 128, 128), (1, 129, 256)],
)
def test_the_vocabulary_is_padded_to_the_tensor_parallel_size(tp: int, vocabulary: int, padded: int) -> None:
    model = replace(model_of("gpt_tiny"), vocab_size=vocabulary, tensor_model_parallel_size=tp)
    assert padded_vocab_size(model) == padded
    extra = flops_per_token(model) - flops_per_token(replace(model, vocab_size=128, tensor_model_parallel_size=1))
    assert extra == 6 * model.hidden_size * (padded - 128)


def test_a_model_without_a_vocabulary(sentence: Sentence) -> None:
    with pytest.raises(ValueError, match="vocab_size") as caught:
        flops_per_token(replace(model_of("gpt_tiny"), vocab_size=None))  # type: ignore[arg-type]
    sentence(caught)
