"""Hybrid models on a CPU: attention, MLP and MoE layers by a pattern."""

from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")

from cloudai_mbridge.training.compat.models import has_unified_patterns
from cloudai_mbridge.training.models.hybrid_provider import HybridModelProvider
from tests.training.conftest import Train

MODEL: dict[str, Any] = {
    "hybrid_layer_pattern": "*-*E",
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "init_method_std": 0.1,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
}


@pytest.mark.kept_ranks
@pytest.mark.process
def test_layouts_learn_the_same(train: Train) -> None:
    """Also when a checkpoint of one is resumed in the other."""
    steps = {"train_iters": 4, "exit_interval": 4, "global_batch_size": 4}
    sections = {"model": MODEL, "train": steps, "optimizer": {"lr": 1e-2, "min_lr": 1e-2}}
    one = train(1, sections).losses
    tp = {**MODEL, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    split = {**sections, "checkpoint": {"save": "ckpt", "load": "ckpt"}}
    first = train(2, {**split, "model": tp, "train": {**steps, "exit_interval": 2}}).losses
    second = train(2, {**split, "model": {**MODEL, "pipeline_model_parallel_size": 2}}).losses
    assert first | second == pytest.approx(one, abs=1e-5)


@pytest.mark.skipif(not has_unified_patterns(), reason="Megatron-Core 0.16 cannot predict with hybrid models")
@pytest.mark.kept_ranks
@pytest.mark.process
def test_multi_token_prediction(train: Train) -> None:
    sections = {"model": {**MODEL, "hybrid_layer_pattern": "*-*E/*E"}, "train": {"train_iters": 2}}
    losses = train(1, sections).records[-1]["losses"]
    assert losses["mtp_1 loss"] > 1


def test_what_a_pattern_may_not_hold(sentence: Sentence) -> None:
    for pattern in ("*X", "*-/E"):
        with pytest.raises(ValueError) as caught:
            HybridModelProvider(hidden_size=32, hybrid_layer_pattern=pattern, mtp_num_layers=2).finalize()
        sentence(caught, symbols=r"(?<=; use ).*")
