"""Sparse attention over keys that an indexer selects (DSA, arXiv 2512.02556), with absorbed matrices as in Megatron-
Core. FLOPs per token; unequal lengths are taken at their effective length, which is exact below top-k.

Compressed sparse attention (DeepSeek-V4's hybrid) has a window, and keys compressed by `csa_compress_ratios`: 0, 4 or
128 for every layer, multi-token prediction included; an indexer selects the keys of ratio 4.
"""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.training.flops.attention import latent_projections, latent_query
from cloudai_mbridge.training.flops.quantities import Cost, Lengths, choose, read

_RATIOS = (0, 4, 128)  # of compression


@dataclass(frozen=True)
class _Indexer:
    """Heads and head dimension of the indexer, and how many keys it selects."""

    heads: int
    dim: int
    topk: int


def sparse_latent(model: Any, lengths: Lengths, mtp: int) -> Cost:
    """All layers of sparse attention. Raises ValueError: a size of indexer or latent is missing or not positive."""
    rank, rope = read(model, "kv_lora_rank", 0), read(model, "qk_pos_emb_head_dim", 0)
    if rank <= 0:
        raise ValueError(f"kv_lora_rank is {rank}; sparse attention needs a positive one")
    indexer = _indexer_of(model)
    layers: int = model.num_layers + mtp
    core = 6 * layers * _selected_context(indexer.topk, lengths) * model.num_attention_heads * (2 * rank + rope)
    scored = _indexer_layers(model, model.num_layers) + _indexer_layers(model, mtp)
    return latent_projections(model) * layers + Cost(0, core) + _indexing(model, indexer, lengths) * scored


def _dense_context(lengths: Lengths) -> Any:
    """Return the keys that the indexer scores for a query on average, the query's own among them."""
    return (lengths.effective + 1) / 2


def _selected_context(topk: int, lengths: Lengths) -> Any:
    """Return the keys that attention reads for a query on average."""
    is_shorter = topk < lengths.effective
    selected = topk - topk * (topk - 1) / (2 * choose(is_shorter, lengths.effective, topk))
    return choose(is_shorter, selected, _dense_context(lengths))


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


def _indexer_of(model: Any) -> _Indexer:
    """Return the sizes of the model's indexer. Raises ValueError: one is missing or not positive."""
    names = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
    sizes = [read(model, name, 0) for name in names]
    if missing := [name for name, size in zip(names, sizes, strict=True) if size <= 0]:
        raise ValueError(f"{', '.join(missing)} must be set to a positive number")
    return _Indexer(*sizes)


def _indexing(model: Any, indexer: _Indexer, lengths: Lengths) -> Cost:
    """One layer's indexer. Its input is detached, so that training it costs two passes in its weights, not three.

    The gradient of the scores, and the attention that it is taught by, cover the selected keys with the sparse loss.
    """
    h, heads, dim = model.hidden_size, indexer.heads, indexer.dim
    is_trained = read(model, "dsa_indexer_loss_coeff", 0.0) > 0
    weights = read(model, "q_lora_rank", h) * heads * dim + h * dim + h * heads
    score = heads * (dim + 1)
    core = 2 * _dense_context(lengths) * score
    if is_trained:
        is_sparse = read(model, "dsa_indexer_use_sparse_loss", False)
        context = _selected_context(indexer.topk, lengths) if is_sparse else _dense_context(lengths)
        taught = model.num_attention_heads * (read(model, "kv_lora_rank", 0) + read(model, "qk_pos_emb_head_dim", 0))
        core = core + 4 * context * score + 2 * context * taught
    return Cost((4 if is_trained else 2) * weights, core)


def compressed_sparse(model: Any, lengths: Lengths, mtp: int) -> Cost:
    """All layers of compressed sparse attention.

    Raises ValueError: no `q_lora_rank`; a ratio list that is missing, of the wrong length or with other ratios; layers
    of ratio 4 without the sizes of the indexer.
    """
    if read(model, "q_lora_rank") is None:
        raise ValueError("q_lora_rank is not set; compressed sparse attention needs it")
    plain, by_4, by_128 = _count_ratios(model, mtp)
    h, heads, v = model.hidden_size, model.num_attention_heads, read(model, "v_head_dim", 64)
    window = read(model, "csa_window_size", 128)
    keys = (plain + by_128 + by_4) * window
    compressors = 2 * h * (2 * v * by_4 + v * by_128)
    quadratic = lengths.effective * by_128 * heads * v / 128
    cost = _projections(model) * (plain + by_4 + by_128)
    if by_4:
        indexer = _indexer_of(model)
        keys = keys + by_4 * _selected(indexer.topk, lengths)
        cost += _compressed_indexing(model, indexer, lengths) * by_4
    return cost + Cost(6 * compressors, 6 * (2 * heads * v * keys + quadratic))


def _projections(model: Any) -> Cost:
    """One layer's queries, shared key and value, and the output through `o_groups` low-rank groups."""
    h, heads, v = model.hidden_size, model.num_attention_heads, read(model, "v_head_dim", 64)
    rank, groups = read(model, "o_lora_rank", 0), read(model, "o_groups", 1)
    return Cost(6 * (latent_query(model) + h * v + v + heads * v * rank + groups * rank * h))


def _compressed_indexing(model: Any, indexer: _Indexer, lengths: Lengths) -> Cost:
    h, heads, dim = model.hidden_size, indexer.heads, indexer.dim
    weights = 4 * h * dim + model.q_lora_rank * heads * dim + h * heads
    return Cost(6 * weights, 6 * lengths.effective * heads * dim / 4)


def _selected(topk: int, lengths: Lengths) -> Any:
    """Return the compressed keys that a query reads on average. The reference takes the configured length here."""
    available = lengths.configured // 4
    selected = choose(topk < available, topk, available)
    return selected * (1 - selected * 4 / (2 * lengths.configured))


def _count_ratios(model: Any, mtp: int) -> tuple[int, int, int]:
    ratios, layers = read(model, "csa_compress_ratios"), model.num_layers + mtp
    if ratios is None:
        raise ValueError("csa_compress_ratios is not set; compressed sparse attention needs it")
    if len(ratios) != layers:
        raise ValueError(
            f"csa_compress_ratios has {len(ratios)} entries for {layers} layers"
            f" (num_layers={model.num_layers}, mtp_num_layers={mtp})"
        )
    if others := sorted(set(ratios) - set(_RATIOS)):
        raise ValueError(f"csa_compress_ratios has entries other than 0, 4 and 128: {others}")
    plain, by_4, by_128 = (list(ratios).count(ratio) for ratio in _RATIOS)
    return plain, by_4, by_128
