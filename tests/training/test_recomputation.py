"""Modules whose activations are computed again in the backward pass: the same losses."""

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.training.conftest import Train

pytestmark = pytest.mark.process

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1],
}
# The others need Transformer Engine
MODULES = ["core_attn", "mla_up_proj", "mlp", "moe"], ["shared_experts"]


def test_recomputed_modules(train: Train) -> None:
    steps = {"train_iters": 2, "global_batch_size": 2}
    kept = train(1, {"train": steps, "model": MODEL}).losses
    for modules in MODULES:
        model = {**MODEL, "recompute_granularity": "selective", "recompute_modules": modules}
        assert train(1, {"train": steps, "model": model}).losses == kept
