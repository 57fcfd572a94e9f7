"""Compressed sparse attention (DeepSeek-V4's hybrid): a window, and keys compressed by `csa_compress_ratios`: 0, 4 or
128 for every layer, multi-token prediction included; those of 4 are selected by an indexer. FLOPs per token."""

from typing import Any

from cloudai_mbridge.training.flops.attention import latent_query
from cloudai_mbridge.training.flops.quantities import Cost, Lengths, choose, read
from cloudai_mbridge.training.flops.sparse_attention import Indexer, indexer_of

RATIOS = (0, 4, 128)


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
        indexer = indexer_of(model)
        keys = keys + by_4 * _selected(indexer.topk, lengths)
        cost += _indexing(model, indexer, lengths) * by_4
    return cost + Cost(6 * compressors, 6 * (2 * heads * v * keys + quadratic))


def _projections(model: Any) -> Cost:
    """One layer's queries, shared key and value, and the output through `o_groups` low-rank groups."""
    h, heads, v = model.hidden_size, model.num_attention_heads, read(model, "v_head_dim", 64)
    rank, groups = read(model, "o_lora_rank", 0), read(model, "o_groups", 1)
    return Cost(6 * (latent_query(model) + h * v + v + heads * v * rank + groups * rank * h))


def _indexing(model: Any, indexer: Indexer, lengths: Lengths) -> Cost:
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
    if others := sorted(set(ratios) - set(RATIOS)):
        raise ValueError(f"csa_compress_ratios has entries other than 0, 4 and 128: {others}")
    plain, by_4, by_128 = (list(ratios).count(ratio) for ratio in RATIOS)
    return plain, by_4, by_128
