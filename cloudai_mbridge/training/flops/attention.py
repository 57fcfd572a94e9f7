"""Attention of one layer: grouped-query and multi-latent.

FLOPs per token. Causal: a query sees s/2 keys on average; the core is two products, so 12 per head dimension and key.
"""

from collections.abc import Iterable
from typing import Any

from cloudai_mbridge.training.flops.layers import has_window, window_of
from cloudai_mbridge.training.flops.quantities import Cost, Formula, Lengths, choose, head_dim, query_groups, read


def grouped_query_layers(
    model: Any, lengths: Lengths, formula: Formula, layers: int, numbers: Iterable[int], *, with_gate: bool = True
) -> Cost:
    """Cost of `layers` layers of multi-head or grouped-query attention.

    numbers: of the layers that may have a sliding window, counted from 1. with_gate: count the projection of
    `attention_output_gate`, if the model has one.
    """
    full = _grouped_query(model, lengths.effective / 2, with_gate)
    if (window := window_of(model)) is None or formula is Formula.OLD:
        return full * layers
    windowed = sum(has_window(model, number) for number in numbers)
    return full * (layers - windowed) + _grouped_query(model, _window_context(window, lengths), with_gate) * windowed


def _grouped_query(model: Any, context: Any, with_gate: bool) -> Cost:
    """One layer. context: keys that a query sees on average."""
    h, d = model.hidden_size, head_dim(model)
    q = d * model.num_attention_heads
    gate = q if with_gate and read(model, "attention_output_gate", False) else 0
    linear = 6 * (h * (q + 2 * d * query_groups(model) + gate) + q * h)
    return Cost(linear, 12 * q * context)


def _window_context(window: int, lengths: Lengths) -> Any:
    """Return the keys that a query sees on average in a window of W: W - W(W-1)/(2s), the first see fewer."""
    is_shorter = window < lengths.mean
    within = window - window * (window - 1) / (2 * choose(is_shorter, lengths.mean, max(window, 1)))
    return choose(is_shorter, within, lengths.effective / 2)


def latent(model: Any, lengths: Lengths) -> Cost:
    """One layer of multi-latent attention (DeepSeek-V2, arXiv 2405.04434). The "+ 1" are the norms of the latents."""
    heads, qk, rope, v = _head_sizes(model)
    core = heads * (qk + rope) * lengths.effective / 2 + heads * v * lengths.effective / 2
    return latent_projections(model) + Cost(0, 6 * core)


def latent_projections(model: Any) -> Cost:
    """Return the projections of multi-latent attention, the same for its sparse variant."""
    h, rank = model.hidden_size, read(model, "kv_lora_rank", 0)
    heads, qk, rope, v = _head_sizes(model)
    key_value = rank * (h + heads * (qk + v) + 1) + h * rope
    return Cost(6 * (latent_query(model) + key_value + heads * v * h))


def latent_query(model: Any) -> Any:
    """Return the weights of the query projection: through a latent of `q_lora_rank`, or direct if that is None."""
    h, rank = model.hidden_size, read(model, "q_lora_rank")
    heads, qk, rope, _ = _head_sizes(model)
    width = heads * (qk + rope)
    return h * width if rank is None else rank * (h + width + 1)


def _head_sizes(model: Any) -> tuple[Any, Any, Any, Any]:
    """Return (heads, query/key dimension, rotary dimension, value dimension)."""
    qk, rope = read(model, "qk_head_dim", 64), read(model, "qk_pos_emb_head_dim", 0)
    return model.num_attention_heads, qk, rope, read(model, "v_head_dim", 64)
