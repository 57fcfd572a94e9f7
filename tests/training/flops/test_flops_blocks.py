"""Every block against its formula as docs/tables/flops.txt states it, written once more, on arbitrary sizes."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.training.flops import NEW, OLD, Lengths, cost_per_token, flops_per_token, moe_layer_pattern
from cloudai_mbridge.training.flops.quantities import count_layers
from cloudai_mbridge.training.flops.total import projections
from tests.cases import every
from tests.golden import Sentence

SIZES = st.integers(1, 64)
LENGTHS = st.integers(1, 4096)


def model_of(**fields: Any) -> SimpleNamespace:
    """Return a small model; anything that reads like a Megatron config does."""
    base = {
        "num_layers": 4,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "seq_length": 4,
        "gated_linear_unit": True,
        "activation": "silu",
    }
    return SimpleNamespace(**(base | fields))


def attention_of(model: Any, formula: str = NEW) -> float:
    """Return the FLOPs of all layers' attention: what is left without MLPs, logits and what joins prediction layers."""
    h, mtp = model.hidden_size, getattr(model, "mtp_num_layers", None) or 0
    layers = model.num_layers + mtp
    mlp = 6 * h * projections(model, formula) * model.ffn_hidden_size * layers  # type: ignore[arg-type]
    rest = mlp + 6 * h * 128 * (1 + mtp) + 6 * mtp * (3 * h + 2 * h * h)
    return float(cost_per_token(model, Lengths.fixed(model.seq_length), formula).total) - rest


def test_a_model_counted_by_hand() -> None:
    """h=8, f=16, 2 heads of 4, s=4, V=128 (padded): per layer 3*8*16 + 4*64 + 8*4 multiply-adds, then the logits."""
    assert flops_per_token(model_of()) == 6 * (4 * (3 * 8 * 16 + 4 * 64 + 8 * 4) + 8 * 128)


# MLPs and experts


@settings(deadline=None)
@given(f=SIZES, fe=SIZES, k=st.integers(1, 8), fs=st.integers(0, 64), latent=st.none() | SIZES, gated=st.booleans())
def test_experts(f: int, fe: int, k: int, fs: int, latent: int | None, gated: bool) -> None:
    dense = model_of(ffn_hidden_size=f, gated_linear_unit=gated)
    sparse = model_of(
        ffn_hidden_size=f,
        gated_linear_unit=gated,
        num_moe_experts=8,
        moe_layer_freq=[1, 0, 0, 1],
        moe_router_topk=k,
        moe_ffn_hidden_size=fe,
        moe_shared_expert_intermediate_size=fs,
        moe_latent_size=latent,
    )
    kappa, h = (3 if gated else 2), 8
    routed = fe * k * kappa if latent is None else fe * k * kappa * latent / h + 2 * latent
    expected = 6 * h * 2 * (routed + fs * kappa - f * kappa)
    assert flops_per_token(sparse) - flops_per_token(dense) == pytest.approx(expected)


def test_experts_are_as_wide_as_the_mlp_by_default() -> None:
    moe = model_of(num_moe_experts=4, moe_router_topk=2)
    assert flops_per_token(moe) - flops_per_token(model_of()) == 6 * 8 * 3 * 4 * 16


class SiLU:
    """A module that is called as torch's is."""


def silu() -> None:
    """A function that is called as torch's is."""


@every(
    ("activation", "is_silu"),
    [("silu", True), ("quick_gelu", False), ("squared_relu", False), (silu, True), (SiLU, True), (SiLU(), True)],
)
def test_the_old_formula_counts_the_gate_of_silu_only(activation: Any, is_silu: bool) -> None:
    model = model_of(activation=None, activation_func=activation)
    assert projections(model, OLD) == (3 if is_silu else 2)
    assert projections(model, NEW) == 3
    assert projections(model_of(gated_linear_unit=False), NEW) == 2


# Which layers hold experts


@every(
    ("freq", "pattern"),
    [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (3, [1, 0, 0, 1]), (9, [1, 0, 0, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])],
)
def test_the_pattern_of_expert_layers(freq: Any, pattern: list[int]) -> None:
    model = model_of(num_moe_experts=4, moe_layer_freq=freq)
    assert moe_layer_pattern(model) == pattern
    assert count_layers(model) == (pattern.count(0), pattern.count(1))
    as_tuple = tuple(freq) if isinstance(freq, list) else freq
    assert moe_layer_pattern(model_of(num_moe_experts=4, moe_layer_freq=as_tuple)) == pattern


def test_without_experts_no_layer_holds_any() -> None:
    assert moe_layer_pattern(model_of(moe_layer_freq=[1, 1, 1, 1])) == [0, 0, 0, 0]


@pytest.mark.parametrize(("freq", "extra"), [([1, 1, 1, 0], (2, 0)), ([0, 0, 0, 1], (0, 2))])
def test_prediction_layers_are_of_the_last_layers_kind(freq: list[int], extra: tuple[int, int]) -> None:
    model = model_of(num_moe_experts=4, moe_layer_freq=freq, mtp_num_layers=2)
    plain, with_mtp = count_layers(model, 0), count_layers(model)
    assert (with_mtp[0] - plain[0], with_mtp[1] - plain[1]) == extra


# Attention


@settings(deadline=None)
@given(heads=st.integers(1, 8), groups=st.integers(1, 8), d=SIZES, s=LENGTHS, gate=st.booleans())
def test_grouped_query_attention(heads: int, groups: int, d: int, s: int, gate: bool) -> None:
    model = model_of(
        num_attention_heads=heads, num_query_groups=groups, kv_channels=d, seq_length=s, attention_output_gate=gate
    )
    h, q = 8, d * heads
    assert attention_of(model) == 6 * 4 * (h * (q + 2 * d * groups + (q if gate else 0)) + q * h + q * s)


@every(
    ("skip", "windowed"),
    [(None, 4), (1, 0), (2, 2), (3, 3), ([1, 0, 0, 0], 1), ([1, 1, 1, 1, 1, 1], 4), ([1], 1), ("none", 0)],
)
@every("window", [[3, 0], (3, 0), 4, [2, 1]])
def test_sliding_windows(skip: Any, windowed: int, window: Any) -> None:
    """A window of 4 in a sequence of 10: the queries see 1, 2, 3, 4, 4, 4, 4, 4, 4, 4 keys."""
    model = model_of(seq_length=10, window_size=window, window_attn_skip_freq=skip)
    full = model_of(seq_length=10)
    keys = (1 + 2 + 3 + 7 * 4) / 10
    assert attention_of(full) - attention_of(model) == pytest.approx(6 * windowed * 2 * 8 * (10 / 2 - keys))
    assert flops_per_token(model, OLD) == flops_per_token(full, OLD)


@every("window", [(-1, 0), (-1, -1), (3, -1), [9, 0], 10, 5000])
def test_a_window_that_limits_nothing(window: Any) -> None:
    assert flops_per_token(model_of(seq_length=10, window_size=window)) == flops_per_token(model_of(seq_length=10))


LATENT = {"multi_latent_attention": True, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4, "v_head_dim": 10}


@settings(deadline=None)
@given(rq=st.none() | SIZES, rkv=SIZES, s=LENGTHS, mtp=st.integers(0, 2))
def test_multi_latent_attention(rq: int | None, rkv: int, s: int, mtp: int) -> None:
    model = model_of(q_lora_rank=rq, kv_lora_rank=rkv, seq_length=s, mtp_num_layers=mtp, **LATENT)
    h, a, qk, r, v = 8, 2, 12, 4, 10
    query = h * a * (qk + r) if rq is None else rq * (h + a * (qk + r) + 1)
    layer = query + rkv * (h + a * (qk + v) + 1) + h * r + a * v * h + s * a * (qk + r) / 2 + s * a * v / 2
    assert attention_of(model) == pytest.approx(6 * (4 + mtp) * layer)


# Sparse attention

INDEXER = {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 5, "dsa_indexer_topk": 16}


@settings(deadline=None)
@given(
    rq=st.none() | SIZES,
    rkv=SIZES,
    s=LENGTHS,
    mtp=st.integers(0, 2),
    coeff=st.sampled_from([None, 0.0, 0.01]),
    is_sparse=st.booleans(),
)
def test_sparse_attention(rq: int | None, rkv: int, s: int, mtp: int, coeff: float | None, is_sparse: bool) -> None:
    plain = model_of(q_lora_rank=rq, kv_lora_rank=rkv, seq_length=0, mtp_num_layers=mtp, **LATENT)
    model = model_of(
        **{**vars(plain), "seq_length": s, **INDEXER},
        experimental_attention_variant="dsa",
        dsa_indexer_loss_coeff=coeff,
        dsa_indexer_use_sparse_loss=is_sparse,
    )
    h, a, r, heads, dim, k = 8, 2, 4, 3, 5, 16
    layers = 4 + mtp
    dense = (s + 1) / 2
    selected = dense if s <= k else k - k * (k - 1) / (2 * s)
    expected = attention_of(plain) + 6 * layers * selected * a * (2 * rkv + r)
    expected += (4 if coeff else 2) * layers * ((h if rq is None else rq) * heads * dim + h * dim + h * heads)
    expected += 2 * layers * dense * heads * (dim + 1)
    if coeff:
        context = selected if is_sparse else dense
        expected += 4 * layers * context * heads * (dim + 1) + 2 * layers * context * a * (rkv + r)
    assert attention_of(model) == pytest.approx(expected)


@every(
    ("layers", "freq", "offset", "indexing"),
    [(8, 1, 0, 8), (8, 4, 0, 2), (8, 4, 1, 2), (8, 4, 3, 4), (9, 4, 1, 3), (2, 4, 5, 2)],
)
def test_layers_that_share_selected_keys(layers: int, freq: int, offset: int, indexing: int) -> None:
    """Up to the offset every layer selects, then every freq-th counted from it."""
    model = model_of(num_layers=layers, kv_lora_rank=6, q_lora_rank=7, **LATENT, **INDEXER)
    model.experimental_attention_variant = "dsa"
    every = attention_of(model)
    model.dsa_indexer_topk_freq, model.dsa_indexer_skip_topk_offset = freq, offset
    one = 2 * (7 * 15 + 8 * 5 + 8 * 3) + 2 * 2.5 * 18
    assert every - attention_of(model) == pytest.approx((layers - indexing) * one)


# Compressed sparse attention

COMPRESSED = {
    "experimental_attention_variant": "dsv4_hybrid",
    "q_lora_rank": 7,
    "o_lora_rank": 6,
    "o_groups": 2,
    "csa_window_size": 9,
    **LATENT,
    **INDEXER,
}


@settings(deadline=None)
@given(ratios=st.lists(st.sampled_from([0, 4, 128]), min_size=5, max_size=5), s=st.integers(4, 4096))
def test_compressed_sparse_attention(ratios: list[int], s: int) -> None:
    model = model_of(csa_compress_ratios=ratios, mtp_num_layers=1, seq_length=s, **COMPRESSED)
    h, a, qk, r, v, rq, ro, groups, w, heads, dim, k = 8, 2, 12, 4, 10, 7, 6, 2, 9, 3, 5, 16
    n0, n4, n128 = (ratios.count(ratio) for ratio in (0, 4, 128))
    layer = rq * (h + a * (qk + r) + 1) + h * v + v + a * v * ro + groups * ro * h
    top = min(k, s // 4)
    sparse = 2 * a * v * (n0 * w + n128 * w + n4 * (w + top * (1 - 4 * top / (2 * s))))
    compressor = 2 * h * (2 * v * n4 + v * n128)
    indexer = n4 * (4 * h * dim + rq * heads * dim + h * heads)
    quadratic = s * (n128 * a * v / 128 + n4 * heads * dim / 4)
    assert attention_of(model) == pytest.approx(6 * (5 * layer + sparse + compressor + indexer + quadratic))


def test_layers_without_selection_need_no_indexer() -> None:
    fields = {**COMPRESSED, "csa_compress_ratios": [0, 128, 128, 0], "dsa_indexer_topk": None}
    assert flops_per_token(model_of(**fields)) > 0


# Linear attention


@settings(deadline=None)
@given(variant=st.sampled_from(["gated_delta_net", "gdn", "gdn2"]), dk=SIZES, dv=SIZES, nk=SIZES, nv=SIZES)
def test_gated_delta_net(variant: str, dk: int, dv: int, nk: int, nv: int) -> None:
    model = model_of(
        experimental_attention_variant=variant,
        linear_attention_freq=4,
        linear_key_head_dim=dk,
        linear_value_head_dim=dv,
        linear_num_key_heads=nk,
        linear_num_value_heads=nv,
        linear_conv_kernel_dim=3,
    )
    h, qk, v = 8, dk * nk, dv * nv
    width = 4 * qk + 3 * v if variant == "gdn2" else 2 * qk + 2 * v + 2 * nv
    linear = 6 * (h * width + 3 * (2 * qk + v) + 4 * nv * dv**2 + h * v)
    assert attention_of(model) == pytest.approx(3 * linear + attention_of(model_of()) / 4)


@every(("freq", "mtp", "linear_layers"), [(4, 0, 3), (1, 0, 0), (2, 1, 2), ([1, 0, 0, 1], 2, 4), ([1, 1, 1, 0], 2, 3)])
def test_which_layers_are_linear(freq: Any, mtp: int, linear_layers: int) -> None:
    """Prediction layers are of the last layer's kind."""
    sizes = {"mtp_num_layers": mtp, "seq_length": 64}
    model = model_of(experimental_attention_variant="gdn", linear_attention_freq=freq, **sizes)
    standard = attention_of(model_of(**sizes)) / (4 + mtp)
    linear = attention_of(model_of(experimental_attention_variant="gdn", linear_attention_freq=[1] * 4)) / 4
    assert attention_of(model) == pytest.approx(linear_layers * linear + (4 + mtp - linear_layers) * standard)


@every(("numbers", "mtp", "count"), [([1, 2, 3], 0, 3), ([2, 4], 1, 3), ([4, 4], 0, 1), ([], 0, 0)])
def test_kimi_delta_attention(numbers: list[int], mtp: int, count: int) -> None:
    sizes = {"kv_lora_rank": 6, "q_lora_rank": 7, "mtp_num_layers": mtp, **LATENT}
    kimi = {"kimi_linear_head_dim": 5, "kimi_linear_num_heads": 3, "kimi_linear_conv_kernel_size": 4}
    h, n, d, p = 8, 3, 5, 15
    linear = 6 * (5 * h * p + h * n + h * d + d * p + 3 * 4 * p + 4 * n * d**2)
    standard = attention_of(model_of(**sizes)) / (4 + mtp)
    model = model_of(kimi_kda_layers=numbers, **sizes, **kimi)
    assert attention_of(model) == pytest.approx(count * linear + (4 + mtp - count) * standard)


# Hybrid models


def hybrid_of(pattern: str | None, **fields: Any) -> SimpleNamespace:
    sizes = {
        "hybrid_layer_pattern": pattern,
        "is_hybrid_model": True,
        "kv_channels": 6,
        "num_query_groups": 1,
        "mamba_state_dim": 5,
        "mamba_num_groups": 3,
        "mamba_num_heads": 7,
        "moe_ffn_hidden_size": 11,
        "moe_router_topk": 2,
        "moe_shared_expert_intermediate_size": 9,
    }
    return model_of(**(sizes | fields))


LOGITS = 6 * 8 * 128


def layers_of(pattern: str, **fields: Any) -> float:
    return flops_per_token(hybrid_of(pattern, **fields)) - LOGITS


@settings(deadline=None)
@given(s=LENGTHS, gated=st.booleans(), latent=st.none() | SIZES)
def test_hybrid_blocks(s: int, gated: bool, latent: int | None) -> None:
    h, a, g, d, f, fe, k, fs, c = 8, 2, 1, 6, 16, 11, 2, 9, (1.5 if gated else 1)
    p = d * a / h
    inner = 2 * h
    gdn = 2 * (8 * (2 * 2048 + 2 * 4096 + 64) + 4 * (2 * 2048 + 4096) + 4 * 32 * 128**2 + 8 * 4096)
    moe = 4 * (latent or h) * fe * k * c + (4 * h * latent if latent else 0) + 4 * h * fs * c
    forward = {
        "*": 4 * h * p * (h + h * g / a) + 2 * h * p * s,
        "M": 2 * h * (2 * inner + 2 * 3 * 5 + 7) + 7 * inner * 5 + 2 * inner * h,
        "-": 4 * f * h * c,
        "E": moe,
        "G": gdn,
    }
    for symbol, cost in forward.items():
        counted = layers_of(symbol, seq_length=s, gated_linear_unit=gated, moe_latent_size=latent)
        assert counted == pytest.approx(3 * cost), symbol


def test_separators_and_prediction_blocks_of_a_pattern() -> None:
    """Stages count for nothing; every block of prediction counts its layers and the logits once more."""
    plain = flops_per_token(hybrid_of("M*-EM*E"))
    assert flops_per_token(hybrid_of("M*-|EM|*E")) == plain
    block = layers_of("*E")
    assert flops_per_token(hybrid_of("M*-|EM|*E/*E/*E")) == pytest.approx(plain + 2 * (block + LOGITS))
    assert flops_per_token(hybrid_of("M*-EM*E/*E", mtp_num_layers=1)) == pytest.approx(plain + block + LOGITS)
    assert flops_per_token(hybrid_of("M*-EM*E/*E/*E"), mtp_num_layers=0) == plain
    assert flops_per_token(hybrid_of("M*-EM*E/*E"), mtp_num_layers=3) == pytest.approx(plain + 3 * (block + LOGITS))


def test_ratios_instead_of_a_pattern() -> None:
    model = hybrid_of(None, num_layers=10, hybrid_attention_ratio=0.2, hybrid_mlp_ratio=0.3)
    assert flops_per_token(model) == flops_per_token(hybrid_of("**---MMMMM"))


def test_windows_of_a_hybrid_go_by_the_layers_number() -> None:
    """Layers 2 and 4 are attention; of these, every second one is full; prediction is always full."""
    fields = {"window_size": [3, 0], "seq_length": 10}
    saved = 3 * 2 * 12 * (10 - 2 * (1 + 2 + 3 + 7 * 4) / 10)
    full = flops_per_token(hybrid_of("M*M*/*", seq_length=10))
    assert full - flops_per_token(hybrid_of("M*M*/*", **fields)) == pytest.approx(2 * saved, abs=1)
    assert flops_per_token(hybrid_of("M*M*/*", window_attn_skip_freq=2, **fields)) == full
    assert full - flops_per_token(hybrid_of("M|*M*/*", window_attn_skip_freq=4, **fields)) == pytest.approx(
        saved, abs=1
    )
    assert flops_per_token(hybrid_of("M*M*/*", **fields), OLD) == full


def test_mamba_heads_follow_from_the_width() -> None:
    narrow = hybrid_of("M", mamba_num_heads=None, mamba_head_dim=4)
    assert flops_per_token(narrow) - flops_per_token(hybrid_of("M")) == 6 * 8 * (16 // 4 - 7)


def test_a_hybrid_whose_attention_has_its_own_mlps() -> None:
    model = hybrid_of("****", hybrid_attention_layers_include_mlp=True)
    transformer = model_of(kv_channels=6, num_query_groups=1)
    assert flops_per_token(model) == flops_per_token(transformer)


def test_numbers_stay_whole() -> None:
    assert isinstance(flops_per_token(model_of(seq_length=3, window_size=2)), int)
    total = cost_per_token(model_of(), Lengths.fixed(4)).total
    assert isinstance(total, int)
    assert math.isfinite(cost_per_token(model_of(), Lengths.fixed(0)).total)


# What cannot be

MOE = {"num_moe_experts": 4}
SPARSE = {"experimental_attention_variant": "dsa", "kv_lora_rank": 6, "q_lora_rank": 7, **LATENT, **INDEXER}
RATIOS = {**COMPRESSED, "csa_compress_ratios": [0, 4, 128, 4]}
LINEAR = {"experimental_attention_variant": "gdn"}


@every(
    ("fields", "error"),
    [
        ({**MOE, "moe_layer_freq": [0, 1]}, AssertionError),
        ({**MOE, "moe_layer_freq": [0, 1, 1, 1, 1]}, AssertionError),
        ({**MOE, "moe_layer_freq": "1"}, RuntimeError),
        ({**MOE, "moe_layer_freq": 1.0}, RuntimeError),
        ({**MOE, "moe_layer_freq": [0, 1, 2, 1]}, ValueError),
        ({**MOE, "moe_layer_freq": 0}, ValueError),
        ({"window_size": 2, "window_attn_skip_freq": 0}, ValueError),
        ({**SPARSE, "kv_lora_rank": 0}, ValueError),
        ({**SPARSE, "dsa_indexer_topk": None}, ValueError),
        ({**SPARSE, "dsa_indexer_n_heads": -1}, ValueError),
        ({**SPARSE, "dsa_indexer_topk_freq": 0}, ValueError),
        ({**SPARSE, "dsa_indexer_skip_topk_offset": -1}, ValueError),
        ({**RATIOS, "q_lora_rank": None}, ValueError),
        ({**RATIOS, "csa_compress_ratios": None}, ValueError),
        ({**RATIOS, "csa_compress_ratios": [0, 4, 128]}, ValueError),
        ({**RATIOS, "csa_compress_ratios": [0, 4, 128, 8]}, ValueError),
        ({**RATIOS, "dsa_indexer_head_dim": None}, ValueError),
        ({**LINEAR, "linear_attention_freq": None}, ValueError),
        ({**LINEAR, "linear_attention_freq": [1, 0]}, ValueError),
        ({**LINEAR, "linear_attention_freq": 0}, ValueError),
        ({**LINEAR, "linear_attention_freq": "4"}, TypeError),
        ({"kimi_kda_layers": [0]}, ValueError),
        ({"kimi_kda_layers": [5]}, ValueError),
        ({"is_hybrid_model": True, "hybrid_layer_pattern": "M*X"}, ValueError),
    ],
)
def test_a_model_that_means_nothing(sentence: Sentence, fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        flops_per_token(model_of(**fields))
    sentence(caught)
