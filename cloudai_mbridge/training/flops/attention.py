"""Attention of one layer, FLOPs per token: grouped-query, multi-latent, sparse (DeepSeek's), and linear attention.

Causal: a query sees s/2 keys on average; the core is two products, so 12 per head dimension and key.
"""

from collections.abc import Iterable
from typing import Any

from cloudai_mbridge.training.flops.quantities import (
    Cost,
    Formula,
    Lengths,
    choose,
    has_window,
    head_dim,
    linear_attention_pattern,
    query_groups,
    read,
    window_of,
    with_prediction,
)


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
    # a query sees W - W(W-1)/(2s) keys on average in a window of W: the first see fewer
    is_shorter = window < lengths.mean
    within = window - window * (window - 1) / (2 * choose(is_shorter, lengths.mean, max(window, 1)))
    context = choose(is_shorter, within, lengths.effective / 2)
    return full * (layers - windowed) + _grouped_query(model, context, with_gate) * windowed


def _grouped_query(model: Any, context: Any, with_gate: bool) -> Cost:
    """One layer. context: keys that a query sees on average."""
    h, d = model.hidden_size, head_dim(model)
    q = d * model.num_attention_heads
    gate = q if with_gate and read(model, "attention_output_gate", False) else 0
    linear = 6 * (h * (q + 2 * d * query_groups(model) + gate) + q * h)
    return Cost(linear, 12 * q * context)


def latent(model: Any, lengths: Lengths) -> Cost:
    """One layer of multi-latent attention (DeepSeek-V2, arXiv 2405.04434). The "+ 1" are the norms of the latents."""
    heads, qk, rope, v = _head_sizes(model)
    core = heads * (qk + rope) * lengths.effective / 2 + heads * v * lengths.effective / 2
    return _latent_projections(model) + Cost(0, 6 * core)


def _latent_projections(model: Any) -> Cost:
    """Return the projections of multi-latent attention, the same for its sparse variant."""
    h, rank = model.hidden_size, read(model, "kv_lora_rank", 0)
    heads, qk, rope, v = _head_sizes(model)
    key_value = rank * (h + heads * (qk + v) + 1) + h * rope
    return Cost(6 * (_latent_query(model) + key_value + heads * v * h))


def _latent_query(model: Any) -> Any:
    """Return the weights of the query projection: through a latent of `q_lora_rank`, or direct if that is None."""
    h, rank = model.hidden_size, read(model, "q_lora_rank")
    heads, qk, rope, _ = _head_sizes(model)
    width = heads * (qk + rope)
    return h * width if rank is None else rank * (h + width + 1)


def _head_sizes(model: Any) -> tuple[Any, Any, Any, Any]:
    """Return (heads, query/key dimension, rotary dimension, value dimension)."""
    qk, rope = read(model, "qk_head_dim", 64), read(model, "qk_pos_emb_head_dim", 0)
    return model.num_attention_heads, qk, rope, read(model, "v_head_dim", 64)


def sparse_latent(model: Any, lengths: Lengths, mtp: int) -> Cost:
    """All layers of sparse attention over keys that an indexer selects (DSA, arXiv 2512.02556).

    Matrices are absorbed as in Megatron-Core; unequal lengths are taken at their effective length, which is exact below
    top-k. Raises ValueError: a size of indexer or latent is missing or not positive.
    """
    rank, rope = read(model, "kv_lora_rank", 0), read(model, "qk_pos_emb_head_dim", 0)
    if rank <= 0:
        raise ValueError(f"kv_lora_rank is {rank}; sparse attention needs a positive one")
    layers: int = model.num_layers + mtp
    heads, dim, topk = _indexer_of(model)
    # keys of a query on average, its own among them: scored by the indexer, and read by attention
    dense, is_shorter = (lengths.effective + 1) / 2, topk < lengths.effective
    selected = topk - topk * (topk - 1) / (2 * choose(is_shorter, lengths.effective, topk))
    selected = choose(is_shorter, selected, dense)
    core = 6 * layers * selected * model.num_attention_heads * (2 * rank + rope)
    # One layer's indexer. Its input is detached, so that training it costs two passes in its weights, not three. The
    # gradient of the scores, and the attention that it is taught by, cover the selected keys with the sparse loss.
    h, score, is_trained = model.hidden_size, heads * (dim + 1), read(model, "dsa_indexer_loss_coeff", 0.0) > 0
    weights = read(model, "q_lora_rank", h) * heads * dim + h * dim + h * heads
    indexing = 2 * dense * score
    if is_trained:
        context = selected if read(model, "dsa_indexer_use_sparse_loss", False) else dense
        taught = model.num_attention_heads * (rank + rope)
        indexing = indexing + 4 * context * score + 2 * context * taught
    scored = _indexer_layers(model, model.num_layers) + _indexer_layers(model, mtp)
    indexer = Cost((4 if is_trained else 2) * weights, indexing)
    return _latent_projections(model) * layers + Cost(0, core) + indexer * scored


def _indexer_layers(model: Any, layers: int) -> int:
    """Return how many of `layers` select keys of their own instead of reusing the keys of an earlier layer.

    The first `dsa_indexer_skip_topk_offset` do, then every `dsa_indexer_topk_freq`-th; prediction layers are counted
    separately.
    """
    freq, offset = read(model, "dsa_indexer_topk_freq", 1), read(model, "dsa_indexer_skip_topk_offset", 0)
    if not isinstance(freq, int) or freq <= 0:
        raise ValueError(f"dsa_indexer_topk_freq is {freq!r}; use a whole number of at least 1")
    if not isinstance(offset, int) or offset < 0:
        raise ValueError(f"dsa_indexer_skip_topk_offset is {offset!r}; use a whole number of at least 0")
    return sum(max(number - max(offset, 1), 0) % freq == 0 for number in range(1, layers + 1))


def _indexer_of(model: Any) -> tuple[Any, Any, Any]:
    """Return the indexer's heads, their dimension, and how many keys it selects.

    Raises ValueError: one is missing or not positive.
    """
    names = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
    sizes = [read(model, name, 0) for name in names]
    if missing := [name for name, size in zip(names, sizes, strict=True) if size <= 0]:
        raise ValueError(f"{', '.join(missing)} must be set to a positive number")
    heads, dim, topk = sizes
    return heads, dim, topk


def compressed_sparse(model: Any, lengths: Lengths, mtp: int) -> Cost:
    """All layers of compressed sparse attention, DeepSeek-V4's hybrid: a window, and compressed keys.

    `csa_compress_ratios` has 0, 4 or 128 for every layer, multi-token prediction included; an indexer selects the keys
    of ratio 4. Raises ValueError: no `q_lora_rank`; a ratio list that is missing, of the wrong length or with other
    ratios; layers of ratio 4 without the sizes of the indexer.
    """
    if read(model, "q_lora_rank") is None:
        raise ValueError("q_lora_rank is not set; compressed sparse attention needs it")
    layers: int = model.num_layers + mtp
    ratios = read(model, "csa_compress_ratios")
    if ratios is None:
        raise ValueError("csa_compress_ratios is not set; compressed sparse attention needs it")
    if len(ratios) != layers:
        raise ValueError(
            f"csa_compress_ratios has {len(ratios)} entries for {layers} layers"
            f" (num_layers={model.num_layers}, mtp_num_layers={mtp})"
        )
    if others := sorted(set(ratios) - {0, 4, 128}):
        raise ValueError(f"csa_compress_ratios has entries other than 0, 4 and 128: {others}")
    by_4, by_128 = (list(ratios).count(ratio) for ratio in (4, 128))
    h, heads, v = model.hidden_size, model.num_attention_heads, read(model, "v_head_dim", 64)
    # one layer's queries, shared key and value, and the output through `o_groups` low-rank groups
    rank, groups = read(model, "o_lora_rank", 0), read(model, "o_groups", 1)
    cost = Cost(6 * (_latent_query(model) + h * v + v + heads * v * rank + groups * rank * h)) * layers
    keys = layers * read(model, "csa_window_size", 128)
    compressors = 2 * h * (2 * v * by_4 + v * by_128)
    quadratic = lengths.effective * by_128 * heads * v / 128
    if by_4:
        indexers, dim, topk = _indexer_of(model)
        # compressed keys that a query reads on average; the reference takes the configured length here
        available = lengths.configured // 4
        selected = choose(topk < available, topk, available)
        keys = keys + by_4 * (selected * (1 - selected * 4 / (2 * lengths.configured)))
        weights = 4 * h * dim + model.q_lora_rank * indexers * dim + h * indexers
        cost += Cost(6 * weights, 6 * lengths.effective * indexers * dim / 4) * by_4
    return cost + Cost(6 * compressors, 6 * (2 * heads * v * keys + quadratic))


GATED_DELTA_NET = ("gated_delta_net", "gdn", "gdn2")


def gated_delta_net(model: Any) -> Cost:
    """One layer of Gated DeltaNet (arXiv 2412.06464) or its second version.

    Projections in and out, short convolutions, and the recurrence over a d x d state per value head.
    """
    h = model.hidden_size
    key_dim, value_dim = read(model, "linear_key_head_dim", 128), read(model, "linear_value_head_dim", 128)
    value_heads = read(model, "linear_num_value_heads", 32)
    qk, v = key_dim * read(model, "linear_num_key_heads", 16), value_dim * value_heads
    is_second = read(model, "experimental_attention_variant") == "gdn2"
    projected = 4 * qk + 3 * v if is_second else 2 * qk + 2 * v + 2 * value_heads
    convolution = read(model, "linear_conv_kernel_dim", 4) * (2 * qk + v)
    return Cost(6 * (h * projected + h * v), 6 * (convolution + 4 * value_heads * value_dim**2))


def _kimi_delta(model: Any) -> Cost:
    """One layer of Kimi Delta Attention.

    Five projections of the full width, the per-head beta, the low-rank forget gate, convolutions, the recurrence.
    """
    h, dim, heads = model.hidden_size, model.kimi_linear_head_dim, model.kimi_linear_num_heads
    width = heads * dim
    weights = 5 * h * width + h * heads + h * dim + dim * width
    return Cost(6 * weights, 6 * (3 * model.kimi_linear_conv_kernel_size * width + 4 * heads * dim**2))


def with_linear_layers(model: Any, attention: Cost, mtp: int) -> Cost:
    """Return the cost of all layers; some have linear attention in place of their share of `attention`.

    Raises ValueError: the pattern of layers does not fit the model. TypeError: it is neither a number nor a list.
    """
    layers = model.num_layers + mtp
    if read(model, "experimental_attention_variant") in GATED_DELTA_NET:
        replaced = with_prediction(linear_attention_pattern(model), mtp)
        attention = gated_delta_net(model) * replaced + attention / layers * (layers - replaced)
    if numbers := set(read(model, "kimi_kda_layers", ())):
        if outside := sorted(number for number in numbers if not 0 < number <= model.num_layers):
            raise ValueError(f"kimi_kda_layers has {outside}; layers are numbered from 1 to {model.num_layers}")
        replaced = len(numbers) + (mtp if model.num_layers in numbers else 0)
        attention = _kimi_delta(model) * replaced + attention / layers * (layers - replaced)
    return attention
