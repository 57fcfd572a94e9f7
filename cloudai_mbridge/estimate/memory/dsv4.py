"""Parameters of DeepSeek V4's compressed sparse attention: from its formula, not checked against a model.

No released Megatron-Core builds it. Source: Megatron-Bridge's FLOPs formula for the `dsv4_hybrid` variant; the
compressors' widths differ by layer there, and are averaged here.
"""

from cloudai_mbridge.estimate.architecture import Architecture


def dsv4_attention(arch: Architecture, tp: int) -> int:
    """Return the parameters of one layer on one rank, averaged over the layers. What works on latents is not split."""
    h, a, d_v = arch.hidden_size, arch.num_attention_heads // tp, arch.v_head_dim
    r_q, r_o = arch.q_lora_rank or h, arch.o_lora_rank
    query = r_q * (h + a * (arch.qk_head_dim + arch.qk_pos_emb_head_dim) + 1)
    output = a * d_v * r_o + arch.o_groups * r_o * h
    return query + h * d_v + d_v + output + _compressors(arch)


def _compressors(arch: Architecture) -> int:
    ratios = arch.csa_compress_ratios or ()
    heads, dim = arch.dsa_indexer_n_heads or 0, arch.dsa_indexer_head_dim or 0
    h, r_q = arch.hidden_size, arch.q_lora_rank or arch.hidden_size
    compressor = 2 * h * arch.v_head_dim
    indexer = 4 * h * dim + r_q * heads * dim + h * heads
    total = sum({4: 2 * compressor + indexer, 128: compressor}.get(ratio, 0) for ratio in ratios)
    return total // max(1, len(ratios))
