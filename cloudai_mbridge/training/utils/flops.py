"""Training FLOPs of a GPT model, per token. Standard library only: the planner uses it without torch.

Conventions of Megatron-Bridge's accounting: training costs three forward passes and a multiply-add counts as two
FLOPs, hence the factor 6 per weight and token. Norms, softmax, activations and embedding look-ups are not counted.
Attention is causal, so a query sees half of the sequence on average. The vocabulary is the padded one.
"""

from typing import Any

FLOPS_FORMULA = "megatron-bridge/new"


def flops_per_token(model: Any, mtp_num_layers: int = 0) -> int:
    """Model FLOPs to train on one token of a full sequence of `model.seq_length` tokens.

    `mtp_num_layers` adds that many multi-token-prediction layers, each of the kind of the last layer.
    """
    h = int(model.hidden_size)
    dense, moe = count_layers(model, mtp_num_layers)
    logits = 6 * h * int(model.padded_vocab_size) * (1 + mtp_num_layers)
    mtp = 6 * mtp_num_layers * (3 * h + 2 * h * h)
    return round(_mlp(model, dense, moe) + 6 * (dense + moe) * _attention(model) + mtp + logits)


def count_layers(model: Any, mtp_num_layers: int = 0) -> tuple[int, int]:
    """Return (dense layers, MoE layers), multi-token-prediction layers included."""
    pattern = moe_layer_pattern(model)
    pattern += [pattern[-1]] * mtp_num_layers
    return pattern.count(0), pattern.count(1)


def moe_layer_pattern(model: Any) -> list[int]:
    """Return 1 for every MoE layer and 0 for every dense one, in order.

    Raises:
        ValueError: `moe_layer_freq` is a list of the wrong length, or has other entries than 0 and 1, or is below 1.
    """
    if model.num_moe_experts is None:
        return [0] * model.num_layers
    freq = model.moe_layer_freq
    if isinstance(freq, int):
        if freq < 1:
            raise ValueError(f"moe_layer_freq is {freq}; use at least 1")
        return [1 if i % freq == 0 else 0 for i in range(model.num_layers)]
    if len(freq) != model.num_layers:
        raise ValueError(f"moe_layer_freq has {len(freq)} entries for {model.num_layers} layers")
    if not set(freq) <= {0, 1}:
        raise ValueError(f"moe_layer_freq has entries other than 0 and 1: {sorted(set(freq) - {0, 1})}")
    return list(freq)


def _mlp(model: Any, dense_layers: int, moe_layers: int) -> int:
    projections = 3 if model.gated_linear_unit else 2
    expert = model.moe_ffn_hidden_size or model.ffn_hidden_size
    shared = model.moe_shared_expert_intermediate_size or 0
    width = model.ffn_hidden_size * dense_layers + (expert * model.moe_router_topk + shared) * moe_layers
    return int(6 * model.hidden_size * projections * width)


def _attention(model: Any) -> float:
    """Multiply-adds of one attention layer for one token."""
    return _latent_attention(model) if model.multi_latent_attention else _grouped_query_attention(model)


def _grouped_query_attention(model: Any) -> int:
    heads = model.num_attention_heads
    head_dim = model.kv_channels or model.hidden_size // heads
    q = head_dim * heads
    kv = 2 * head_dim * (model.num_query_groups or heads)
    return int(model.hidden_size * (q + kv) + q * model.hidden_size + q * model.seq_length)


def _latent_attention(model: Any) -> float:
    h, heads, s = model.hidden_size, model.num_attention_heads, model.seq_length
    qk, rope, v = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    query = h * heads * (qk + rope) if model.q_lora_rank is None else model.q_lora_rank * (h + heads * (qk + rope) + 1)
    key_value = model.kv_lora_rank * (h + heads * (qk + v) + 1) + h * rope
    output = heads * v * h
    return float(query + key_value + output + s * heads * (qk + rope) / 2 + s * heads * v / 2)
