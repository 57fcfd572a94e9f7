"""Model providers: what is derived waits for finalize(), may be derived again, and GPT variants really build."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider, MLAModelProvider
from cloudai_mbridge.training.models.hybrid_provider import MambaModelProvider
from cloudai_mbridge.training.models.other_providers import MIMOProvider, T5ModelProvider
from tests.cases import every
from tests.golden import Sentence
from tests.training.conftest import run_ranks

SMALL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
PROVIDERS = [
    GPTModelProvider(**SMALL, activation_func=F.silu, gated_linear_unit=True, masked_softmax_fusion=False),
    MLAModelProvider(**SMALL),
    MambaModelProvider(hidden_size=64, hybrid_layer_pattern="M-M*", num_attention_heads=4),
    T5ModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4),
]


@every("provider", PROVIDERS)
def test_nothing_is_derived_before_finalize_and_the_same_after_two(provider: Any) -> None:
    assert provider.ffn_hidden_size is None
    provider.finalize()
    once = {name: value for name, value in vars(provider).items() if not name.startswith("_") and not callable(value)}
    assert provider.ffn_hidden_size == 256
    provider.finalize()
    assert {name: vars(provider)[name] for name in once} == once


def test_a_change_after_finalize_is_honoured() -> None:
    provider = GPTModelProvider(**SMALL)
    provider.finalize()
    provider.hidden_size = 128
    provider.finalize()
    assert (provider.ffn_hidden_size, provider.kv_channels) == (512, 32)
    provider.ffn_hidden_size = 100  # the user's now, and no longer derived
    provider.hidden_size = 64
    provider.finalize()
    assert (provider.ffn_hidden_size, provider.kv_channels) == (100, 16)


@every(("groups", "is_legal"), [(4, True), (2, True), (3, False), (0, False)])
def test_query_groups_divide_the_heads(groups: int, is_legal: bool) -> None:
    provider = GPTModelProvider(**SMALL, num_query_groups=groups)
    if is_legal:
        provider.finalize()
        return
    with pytest.raises(AssertionError, match="num_query_groups"):
        provider.finalize()


@every(("tp", "padded"), [(1, 512), (2, 512), (3, 768)])
def test_the_padded_vocabulary(tp: int, padded: int) -> None:
    provider = GPTModelProvider(**SMALL, tensor_model_parallel_size=tp, should_pad_vocab=True)
    assert provider.padded_vocab_size == padded
    provider.should_pad_vocab = False
    assert provider.padded_vocab_size == 512


def test_latent_attention_keeps_its_own_defaults() -> None:
    provider = MLAModelProvider(**SMALL)
    provider.finalize()
    assert (provider.multi_latent_attention, provider.normalization, provider.kv_lora_rank) == (True, "RMSNorm", 512)


@pytest.mark.parametrize("pattern", ["MX", "M-M"])
def test_a_hybrid_pattern_that_does_not_fit(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"model\.(hybrid_layer_pattern|num_layers)"):
        MambaModelProvider(hidden_size=64, num_layers=4, hybrid_layer_pattern=pattern).finalize()


def test_a_modality_needs_its_token(sentence: Sentence) -> None:
    MIMOProvider(modality_encoders={"images": object()}, special_token_ids={"images": 7}).finalize()
    with pytest.raises(ValueError) as caught:
        MIMOProvider(modality_encoders={"audio": object()}).finalize()
    sentence(caught)


@pytest.mark.parametrize("provider", PROVIDERS[3:], ids=lambda provider: type(provider).__name__)
def test_what_is_not_built_says_so(provider: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"^{type(provider).__name__}: this version validates such models"):
        provider.provide()


def _losses(directory: Path, **model: Any) -> list[float]:
    sections = {
        "model": {**SMALL, "ffn_hidden_size": 128, "num_query_groups": 2, "seq_length": 64, "dtype": "fp32", **model},
        "train": {"train_iters": 4, "micro_batch_size": 2, "global_batch_size": 4},
        "optimizer": {"lr": 1e-2},
    }
    (directory / "config.json").write_text(json.dumps(container_data(sections)))
    done = run_ranks(1, ["-m", "cloudai_mbridge.training", "--config", "config.json"], directory)
    return list(done.losses.values())


@pytest.mark.process
@pytest.mark.long
def test_sliding_window_and_token_prediction_train(tmp_path: Path) -> None:
    """Each changes the training: a window of the whole sequence is not a window, a short one is."""
    plain, whole, short = (
        _losses(tmp_path, **window) for window in ({}, {"window_size": [63, 0]}, {"window_size": [3, 0]})
    )
    predicting = _losses(tmp_path, mtp_num_layers=1)
    assert plain == pytest.approx(whole, abs=1e-5)
    assert short != pytest.approx(plain, abs=1e-5)
    assert predicting[0] == pytest.approx(plain[0], abs=1e-5)
    assert predicting[1:] != pytest.approx(plain[1:], abs=1e-5)
    assert all(losses[-1] < losses[0] for losses in (plain, short, predicting))


@pytest.mark.process
def test_the_resolved_file_trains_the_same(tmp_path: Path) -> None:
    losses = _losses(tmp_path)
    command = ["-m", "cloudai_mbridge.training", "--config", "resolved_config.yaml", "train.train_iters=2"]
    done = run_ranks(1, command, tmp_path)
    assert f'"lm loss": {losses[0]}' in done.stdout
    assert done.stdout.count("MBRIDGE_STEP") == 2


@every(("ep", "given", "expected"), [(2, None, 1), (2, 2, 2), (1, None, 2), (1, 2, 2)])
def test_experts_are_not_split_where_ranks_share_them(ep: int, given: int | None, expected: int) -> None:
    """Megatron-Bridge's default since 0.6; Megatron-Core's own is the tensor-parallel size."""
    sizes: Any = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "add_bias_linear": False,
    }
    layout: Any = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": ep}
    model = GPTModelProvider(**sizes, **layout, expert_tensor_parallel_size=given)
    for _ in range(2):
        model.finalize()
        assert model.expert_tensor_parallel_size == expected
    model.expert_model_parallel_size = 1
    model.finalize()
    assert model.expert_tensor_parallel_size == 2
