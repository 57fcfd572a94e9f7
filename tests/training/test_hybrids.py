"""Hybrid models on a CPU: attention, MLP and MoE layers by a pattern."""

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.training.conftest import Train

MODEL: dict[str, Any] = {
    "hybrid_layer_pattern": "*-*E",
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 16,
    "init_method_std": 0.1,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
}


LAYOUTS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
]


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_learn_the_same(train: Train, layout: dict[str, Any]) -> None:
    """Also with a checkpoint between them."""
    steps = {"train_iters": 4, "exit_interval": 4}
    sections = {"model": MODEL, "train": steps, "optimizer": {"lr": 1e-2, "min_lr": 1e-2}}
    one = train(1, sections).losses
    split = {**sections, "model": {**MODEL, **layout}, "checkpoint": {"save": "ckpt", "load": "ckpt"}}
    first = train(2, {**split, "train": {**steps, "exit_interval": 2}}).losses
    assert first | train(2, split).losses == pytest.approx(one, abs=1e-5)
