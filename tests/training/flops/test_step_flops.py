"""The FLOPs of a step: what its ranks have counted goes before the length that they were given."""

from types import SimpleNamespace
from typing import Any

import pytest

from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.training.flops import flops_per_token, num_floating_point_operations
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider
from cloudai_mbridge.training.reporting import reports

MODEL = GPTModelProvider(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    vocab_size=512,
    seq_length=64,
    gated_linear_unit=True,
)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data-parallel replicas train eight sequences: what Megatron would answer."""
    monkeypatch.setattr(reports, "get_current_running_global_batch_size", lambda: 8)
    monkeypatch.setattr(reports.mpu, "get_data_parallel_world_size", lambda: 2)


def state_of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(cfg=SimpleNamespace(model=MODEL), **fields)


def test_the_model_is_the_recipes() -> None:
    assert flops_per_token(MODEL) == flops_per_token(architecture(load_recipe("gpt_tiny")))


@pytest.mark.usefixtures("replicas")
def test_a_step_of_full_sequences() -> None:
    assert reports.flops_per_step(state_of()) == 8 * 64 * flops_per_token(MODEL)
    assert reports.flops_per_step(state_of(), 32) == 8 * 32 * flops_per_token(MODEL, seq_length=32)
    assert reports.flops_of_batch(MODEL, 8, 32) == reports.flops_per_step(state_of(seqlen_sum=0), 32)


@pytest.mark.usefixtures("replicas")
@pytest.mark.parametrize("chunks", [None, 2])
def test_a_step_of_counted_sequences(monkeypatch: pytest.MonkeyPatch, chunks: int | None) -> None:
    """Every replica has four packs of 64 tokens, each of two sequences of 32; each chunk has counted them."""
    monkeypatch.setattr(MODEL, "virtual_pipeline_model_parallel_size", chunks)
    times = chunks or 1
    counted = state_of(seqlen_sum=256 * times, seqlen_squared_sum=4 * 2 * 32**2 * times)
    expected = num_floating_point_operations(counted.cfg, 8, 512, 16 * 32**2)
    assert reports.flops_per_step(counted) == expected == 512 * flops_per_token(MODEL, seq_length=32)
