"""What holds for every model: more of anything costs more, prediction layers add up, arrays count as numbers do."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.training.flops import NEW, OLD, Lengths, cost_per_token, flops_per_token
from tests.cases import every

MODELS = {name: architecture(load_recipe(name)) for name in recipe_names()}
TRANSFORMERS = {name: model for name, model in MODELS.items() if not model.is_hybrid_model}
ANY = st.sampled_from(sorted(MODELS))
FORMULAS = st.sampled_from([OLD, NEW])


@settings(deadline=None)
@given(name=ANY, formula=FORMULAS, s=st.integers(4, 100_000), more=st.integers(1, 100_000))
def test_longer_sequences_cost_more_per_token(name: str, formula: str, s: int, more: int) -> None:
    model = MODELS[name]
    short, long = (flops_per_token(model, formula, seq_length=length) for length in (s, s + more))
    assert short <= long
    if more > 100:
        assert short < long


@settings(deadline=None)
@given(name=st.sampled_from(sorted(set(TRANSFORMERS) - {"deepseek_v4_flash"})), mtp=st.integers(0, 4))
def test_prediction_layers_add_up(name: str, mtp: int) -> None:
    """Each is a layer of the last one's kind, the logits, and the projection that joins both inputs.

    With windows on every second layer, what a prediction layer costs depends on its number.
    """
    model = replace(TRANSFORMERS[name], window_size=None)
    one = flops_per_token(model, mtp_num_layers=1) - flops_per_token(model, mtp_num_layers=0)
    assert flops_per_token(model, mtp_num_layers=mtp) == flops_per_token(model, mtp_num_layers=0) + mtp * one
    freq = model.moe_layer_freq
    continued = freq if isinstance(freq, int) else (*freq, freq[-1])
    layer = replace(model, num_layers=model.num_layers + 1, moe_layer_freq=continued)
    plain, deeper = (flops_per_token(m, mtp_num_layers=0) for m in (model, layer))
    h = model.hidden_size
    assert one == deeper - plain + 6 * h * model.padded_vocab_size + 6 * (3 * h + 2 * h * h)


@settings(deadline=None)
@given(s=st.integers(1, 8192), window=st.integers(1, 9000), skip=st.integers(1, 8))
def test_a_window_never_costs_more_and_a_wide_one_is_full_attention(s: int, window: int, skip: int) -> None:
    model = replace(MODELS["llama3_8b"], seq_length=s)
    windowed = replace(model, window_size=(window - 1, 0), window_attn_skip_freq=skip)
    full, narrow = cost_per_token(model, Lengths.fixed(s)).total, cost_per_token(windowed, Lengths.fixed(s)).total
    if window >= s or skip == 1:
        assert narrow == full
    elif window > 1:
        # a window counts the query's own key, full attention half of it
        assert narrow < full + 12 * 32 * 4096
    wider = replace(windowed, window_size=(window, 0))
    if window + 1 < s:
        assert narrow <= cost_per_token(wider, Lengths.fixed(s)).total


@settings(deadline=None)
@given(name=ANY, widen=st.sampled_from(["ffn_hidden_size", "vocab_size", "kv_channels"]))
def test_nothing_gets_cheaper_when_it_grows(name: str, widen: str) -> None:
    model = MODELS[name]
    assert flops_per_token(model) <= flops_per_token(replace(model, **{widen: 2 * getattr(model, widen)}))


@settings(deadline=None)
@given(name=ANY, tp=st.integers(1, 64))
def test_tensor_parallelism_costs_padding_only(name: str, tp: int) -> None:
    """The formula counts the padding, whether a model's vocabulary is padded or not, as Megatron-Bridge's does."""
    one = replace(MODELS[name], should_pad_vocab=True)
    model = replace(one, tensor_model_parallel_size=tp)
    padding = model.padded_vocab_size - one.padded_vocab_size
    assert padding >= 0
    assert model.padded_vocab_size % (tp * model.make_vocab_size_divisible_by) == 0
    extra = 6 * model.hidden_size * padding * (1 + model.mtp_num_layers)
    assert flops_per_token(model) == flops_per_token(one) + extra


@every("name", MODELS)
@every("formula", [OLD, NEW])
def test_arrays_of_lengths_count_as_numbers_do(name: str, formula: str) -> None:
    lengths = np.array([64, 128, 129, 500, 2048, 4096, 8192, 100_000])
    counted = cost_per_token(MODELS[name], Lengths.fixed(lengths), formula).total
    alone = [cost_per_token(MODELS[name], Lengths.fixed(int(s)), formula).total for s in lengths]
    np.testing.assert_allclose(counted, alone, rtol=1e-14)


def test_arrays_of_widths_count_as_numbers_do() -> None:
    model = MODELS["llama3_8b"]
    widths, vocabularies = np.array([512, 1024]), np.array([1000, 2000])
    many = replace(model, ffn_hidden_size=widths, vocab_size=vocabularies)  # type: ignore[arg-type]
    alone = [
        flops_per_token(replace(model, ffn_hidden_size=int(f), vocab_size=int(v)))
        for f, v in zip(widths, vocabularies, strict=True)
    ]
    assert cost_per_token(many, Lengths.fixed(8192)).total.tolist() == alone
