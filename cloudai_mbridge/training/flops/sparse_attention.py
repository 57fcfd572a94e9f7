"""Sparse attention over keys that an indexer selects (DSA, arXiv 2512.02556), with absorbed matrices as in Megatron-
Core. FLOPs per token; unequal lengths are taken at their effective length, which is exact below top-k."""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.training.flops.attention import latent_projections
from cloudai_mbridge.training.flops.quantities import Cost, Lengths, choose, read


@dataclass(frozen=True)
class Indexer:
    """Heads and head dimension of the indexer, and how many keys it selects."""

    heads: int
    dim: int
    topk: int


def sparse_latent(model: Any, lengths: Lengths, mtp: int) -> Cost:
    """All layers of sparse attention. Raises ValueError: a size of indexer or latent is missing or not positive."""
    rank, rope = read(model, "kv_lora_rank", 0), read(model, "qk_pos_emb_head_dim", 0)
    if rank <= 0:
        raise ValueError(f"kv_lora_rank is {rank}; sparse attention needs a positive one")
    indexer = indexer_of(model)
    layers: int = model.num_layers + mtp
    core = 6 * layers * selected_context(indexer.topk, lengths) * model.num_attention_heads * (2 * rank + rope)
    scored = indexer_layers(model, model.num_layers) + indexer_layers(model, mtp)
    return latent_projections(model) * layers + Cost(0, core) + _indexing(model, indexer, lengths) * scored


def dense_context(lengths: Lengths) -> Any:
    """Return the keys that the indexer scores for a query on average, the query's own among them."""
    return (lengths.effective + 1) / 2


def selected_context(topk: int, lengths: Lengths) -> Any:
    """Return the keys that attention reads for a query on average."""
    is_shorter = topk < lengths.effective
    selected = topk - topk * (topk - 1) / (2 * choose(is_shorter, lengths.effective, topk))
    return choose(is_shorter, selected, dense_context(lengths))


def indexer_layers(model: Any, layers: int) -> int:
    """Return how many of `layers` select keys of their own instead of using those of an earlier layer.

    The first `dsa_indexer_skip_topk_offset` do, then every `dsa_indexer_topk_freq`-th; prediction layers are counted
    separately.
    """
    freq, offset = read(model, "dsa_indexer_topk_freq", 1), read(model, "dsa_indexer_skip_topk_offset", 0)
    if not isinstance(freq, int) or freq <= 0:
        raise ValueError(f"dsa_indexer_topk_freq is {freq!r}; use a whole number of at least 1")
    if not isinstance(offset, int) or offset < 0:
        raise ValueError(f"dsa_indexer_skip_topk_offset is {offset!r}; use a whole number of at least 0")
    return sum(max(number - max(offset, 1), 0) % freq == 0 for number in range(1, layers + 1))


def indexer_of(model: Any) -> Indexer:
    """Return the sizes of the model's indexer. Raises ValueError: one is missing or not positive."""
    names = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
    sizes = [read(model, name, 0) for name in names]
    if missing := [name for name, size in zip(names, sizes, strict=True) if size <= 0]:
        raise ValueError(f"{', '.join(missing)} must be set to a positive number")
    return Indexer(*sizes)


def _indexing(model: Any, indexer: Indexer, lengths: Lengths) -> Cost:
    """One layer's indexer. Its input is detached, so that training it costs two passes in its weights, not three.

    The gradient of the scores, and the attention that it is taught by, cover the selected keys with the sparse loss.
    """
    h, heads, dim = model.hidden_size, indexer.heads, indexer.dim
    is_trained = read(model, "dsa_indexer_loss_coeff", 0.0) > 0
    weights = read(model, "q_lora_rank", h) * heads * dim + h * dim + h * heads
    score = heads * (dim + 1)
    core = 2 * dense_context(lengths) * score
    if is_trained:
        is_sparse = read(model, "dsa_indexer_use_sparse_loss", False)
        context = selected_context(indexer.topk, lengths) if is_sparse else dense_context(lengths)
        taught = model.num_attention_heads * (read(model, "kv_lora_rank", 0) + read(model, "qk_pos_emb_head_dim", 0))
        core = core + 4 * context * score + 2 * context * taught
    return Cost((4 if is_trained else 2) * weights, core)
