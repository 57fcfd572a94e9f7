"""FLOPs per token against the published golden values, and layer patterns."""

from dataclasses import replace
from typing import Any

import pytest

from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider, MLAModelProvider
from cloudai_mbridge.training.utils.flops import count_layers, flops_per_token, moe_layer_pattern


def model_of(**values: Any) -> GPTModelProvider:
    """Return a provider with what our recipes share."""
    kind = MLAModelProvider if values.get("multi_latent_attention") else GPTModelProvider
    return kind(**{"gated_linear_unit": True, "should_pad_vocab": True, **values})


LLAMA: dict[str, Any] = {
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 128256,
    "make_vocab_size_divisible_by": 128,
    "seq_length": 8192,
}
QWEN_MOE: dict[str, Any] = {
    "num_query_groups": 4,
    "kv_channels": 128,
    "vocab_size": 151936,
    "make_vocab_size_divisible_by": 128,
    "num_moe_experts": 128,
    "moe_router_topk": 8,
    "seq_length": 4096,
}
LATENT: dict[str, Any] = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "make_vocab_size_divisible_by": 1280,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "seq_length": 4096,
}
TINY = model_of(num_layers=4, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=100, seq_length=4)

# name -> (model, multi-token-prediction layers, FLOPs per token)
GOLDEN = {
    "llama3_8b": (
        model_of(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, **LLAMA),
        0,
        51470401536,
    ),
    "llama3_70b": (
        model_of(num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, **LLAMA),
        0,
        449222541312,
    ),
    "llama31_405b_tp4": (
        model_of(
            num_layers=126,
            hidden_size=16384,
            ffn_hidden_size=53248,
            num_attention_heads=128,
            tensor_model_parallel_size=4,
            **LLAMA,
        ),
        0,
        2523981152256,
    ),
    "qwen3_30b_a3b": (
        model_of(
            num_layers=48,
            hidden_size=2048,
            ffn_hidden_size=6144,
            num_attention_heads=32,
            moe_ffn_hidden_size=768,
            **QWEN_MOE,
        ),
        0,
        23006281728,
    ),
    "qwen3_235b_a22b": (
        model_of(
            num_layers=94,
            hidden_size=4096,
            ffn_hidden_size=12288,
            num_attention_heads=64,
            moe_ffn_hidden_size=1536,
            **QWEN_MOE,
        ),
        0,
        148034813952,
    ),
    "deepseek_v3": (
        model_of(
            num_attention_heads=128,
            vocab_size=129280,
            num_moe_experts=256,
            moe_layer_freq=[0] * 3 + [1] * 58,
            **LATENT,
        ),
        1,
        259992950784,
    ),
    "kimi_k2": (
        model_of(
            num_attention_heads=64,
            vocab_size=163840,
            num_moe_experts=384,
            moe_layer_freq=[0] + [1] * 60,
            **LATENT,
        ),
        0,
        204477394944,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values_to_the_last_digit(name: str) -> None:
    model, mtp_num_layers, expected = GOLDEN[name]
    assert flops_per_token(model, mtp_num_layers) == expected


def test_a_model_counted_by_hand() -> None:
    """h=8, f=16, 2 heads of 4, s=4, V=128 (padded): per layer 3*8*16 + 4*64 + 8*4 multiply-adds, then the logits."""
    assert flops_per_token(TINY) == 6 * (4 * (3 * 8 * 16 + 4 * 64 + 8 * 4) + 8 * 128)


def test_without_a_gate_there_are_two_projections() -> None:
    plain = replace(TINY, gated_linear_unit=False)
    assert flops_per_token(TINY) - flops_per_token(plain) == 6 * 4 * 8 * 16


@pytest.mark.parametrize(("tp", "padded"), [(1, 128), (2, 256), (4, 512)])
def test_the_padding_of_the_vocabulary_depends_on_tp(tp: int, padded: int) -> None:
    model = replace(TINY, tensor_model_parallel_size=tp)
    assert model.padded_vocab_size == padded
    assert flops_per_token(model) - flops_per_token(TINY) == 6 * 8 * (padded - 128)


def test_a_vocabulary_that_fits_is_not_padded() -> None:
    assert replace(TINY, vocab_size=128).padded_vocab_size == 128
    assert replace(TINY, vocab_size=129).padded_vocab_size == 256


def test_queries_without_a_low_rank() -> None:
    model = replace(GOLDEN["deepseek_v3"][0], q_lora_rank=None)
    dense = 7168 * 128 * 192
    low_rank = 1536 * (7168 + 128 * 192 + 1)
    assert flops_per_token(model) - flops_per_token(GOLDEN["deepseek_v3"][0]) == 6 * 61 * (dense - low_rank)


def test_other_parallel_sizes_cost_no_flops() -> None:
    model = replace(TINY, pipeline_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    assert flops_per_token(model) == flops_per_token(TINY)


# Which layers hold experts


@pytest.mark.parametrize(
    ("freq", "pattern"),
    [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (3, [1, 0, 0, 1]), (9, [1, 0, 0, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])],
)
def test_the_pattern_of_expert_layers(freq: int | list[int], pattern: list[int]) -> None:
    model = replace(TINY, num_moe_experts=4, moe_layer_freq=freq)
    assert moe_layer_pattern(model) == pattern
    assert count_layers(model) == (pattern.count(0), pattern.count(1))


def test_without_experts_no_layer_holds_any() -> None:
    assert moe_layer_pattern(replace(TINY, moe_layer_freq=[1, 1, 1, 1])) == [0, 0, 0, 0]


@pytest.mark.parametrize(("freq", "extra"), [([1, 1, 1, 0], (2, 0)), ([0, 0, 0, 1], (0, 2))])
def test_prediction_layers_are_of_the_last_layers_kind(freq: list[int], extra: tuple[int, int]) -> None:
    model = replace(TINY, num_moe_experts=4, moe_layer_freq=freq)
    plain, with_mtp = count_layers(model), count_layers(model, 2)
    assert (with_mtp[0] - plain[0], with_mtp[1] - plain[1]) == extra


@pytest.mark.parametrize("freq", [[0, 1], [0, 1, 1, 1, 1], []])
def test_a_pattern_of_the_wrong_length(freq: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(freq)} entries for 4 layers"):
        moe_layer_pattern(replace(TINY, num_moe_experts=4, moe_layer_freq=freq))


@pytest.mark.parametrize("freq", [[0, 1, 2, 1], [0, 1, -1, 1], 0, -2])
def test_a_pattern_that_means_nothing(freq: int | list[int]) -> None:
    """An entry that is neither 0 nor 1 would drop its layer from the count without a word."""
    with pytest.raises(ValueError, match="moe_layer_freq"):
        moe_layer_pattern(replace(TINY, num_moe_experts=4, moe_layer_freq=freq))


def test_shared_experts_and_the_default_width_of_experts() -> None:
    moe = replace(TINY, num_moe_experts=4, moe_router_topk=2)
    assert flops_per_token(moe) - flops_per_token(TINY) == 6 * 8 * 3 * 4 * 16  # two experts of the dense width
    shared = replace(moe, moe_shared_expert_intermediate_size=5)
    assert flops_per_token(shared) - flops_per_token(moe) == 6 * 8 * 3 * 4 * 5
