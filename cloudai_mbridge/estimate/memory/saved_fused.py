"""Tensors that Transformer Engine's modules and Megatron-Core's fused kernels save on a GPU: no scores, few copies.

Checked against a rehearsed step (`training/dry/kernels.py`): what Transformer Engine's and Megatron-Core's Python hands
to autograd. A quantized matrix product keeps its input in 8 or 4 bits, everything else is in 16. Attention's
last projection keeps the core attention's output itself, in 16 bits, as it exists anyway (Megatron-Core's
`set_save_original_input`).
"""

from dataclasses import replace

from cloudai_mbridge.estimate.memory.sizes import SavedBytes, Sizes

ROUTER_BYTES = 9  # per token and expert: logits and probabilities in 32 bits, and a map


def norm(z: Sizes, tokens: float, width: int) -> float:
    """Return the bytes that a norm over `width` keeps: its input, and one or two 32-bit statistics per row."""
    return tokens * (z.value * width + (4 if z.arch.normalization == "RMSNorm" else 8))


def attention(z: Sizes) -> SavedBytes:
    """Return the bytes kept by attention: queries, keys, values and output once, and the log-sum of each score row."""
    a, t = z.arch, z.tokens
    if a.multi_latent_attention:
        return _latent_attention(z)
    gate = z.query if a.attention_output_gate else 0
    norms = t * (z.query + z.key) * z.value + t * (z.heads + z.key / a.kv_channels) * 4 if a.qk_layernorm else 0
    return SavedBytes(
        projected=t * (z.query + 2 * z.key + gate) * z.value + norms,
        core=t * z.heads * 4,
        output=t * (z.query + 2 * gate) * z.value,
    )


def _latent_attention(z: Sizes) -> SavedBytes:
    a, t, s = z.arch, z.tokens, z.split_tokens
    ranks = (a.q_lora_rank, "linear_q_up_proj"), (a.kv_lora_rank, "linear_kv_up_proj")
    latents = sum(norm(z, s, rank) + s * rank * z.kept(up) for rank, up in ranks if rank)
    values = a.v_head_dim if a.experimental_attention_variant is None else 0  # keys and values are one there
    return SavedBytes(
        latents=latents,
        projected=t * z.heads * (2 * z.latent_query + values) * z.value,
        core=t * z.heads * 4,
        output=t * z.heads * a.v_head_dim * z.value,
    )


def mamba(z: Sizes) -> SavedBytes:
    """Return the bytes that a Mamba-2 mixer keeps: the input projection, the scan's output, the gated norm's output."""
    a, t = z.arch, z.tokens
    heads = a.mamba_num_heads or 2 * a.hidden_size // a.mamba_head_dim
    inner = heads * a.mamba_head_dim
    projected = 2 * inner + 2 * a.mamba_num_groups * a.mamba_state_dim + heads
    return SavedBytes(
        projected=t * projected / z.tp * z.value,
        core=t * inner / z.tp * z.value,
        output=t * inner / z.tp * z.kept("out_proj"),
    )


def _inner(z: Sizes, tokens: float, ffn: float) -> tuple[float, float]:
    """Return the bytes that an MLP keeps in addition to its input: the activation's input, and its output."""
    return tokens * ffn * (2 if z.arch.gated_linear_unit else 1) * z.value, tokens * ffn * z.kept("linear_fc2")


def mlp(z: Sizes) -> SavedBytes:
    """Return the bytes that a dense feed-forward half keeps."""
    return SavedBytes(ffn=sum(_inner(z, z.tokens, z.arch.ffn_hidden_size / z.tp)))


def moe(z: Sizes) -> SavedBytes:
    """Return the bytes that a mixture of experts keeps; the experts are one grouped product."""
    a, s, rows = z.arch, z.split_tokens, z.expert_tokens
    width = a.moe_latent_size or a.hidden_size
    before, activation = _inner(z, rows, (a.moe_ffn_hidden_size or a.ffn_hidden_size) / z.expert_tp)
    # Megatron-Core clamps by operations of their own, Transformer Engine's fused experts in the activation
    if a.activation_func_clamp_value is not None and not a.use_transformer_engine_op_fuser:
        activation += before
    shared = a.moe_shared_expert_intermediate_size
    latent = s * (a.hidden_size + a.moe_latent_size) * z.kept("fc1_latent_proj") if a.moe_latent_size else 0
    return SavedBytes(
        router=s * (ROUTER_BYTES * (a.num_moe_experts or 0) + 8 * a.moe_router_topk) + 4 * rows,
        experts=rows * width * z.kept("linear_fc1") + latent,
        expert_hidden=before,
        expert_activation=activation,
        shared=sum(_inner(z, z.tokens, shared / z.tp)) if shared else 0,
    )


def head(z: Sizes, depths: int) -> float:
    """Return the bytes kept by the output layer and the loss; depths: 1 and one per token predicted beyond the next."""
    a = z.arch
    logits = z.tokens * (a.padded_vocab_size // z.tp * (4 if z.fp32_logits else z.value) + 9)
    return depths * (z.split_tokens * a.hidden_size * z.value + logits)


def embedding(z: Sizes) -> float:
    """Return the bytes that the embedding keeps: the tokens, and the mask of other ranks' tokens."""
    return z.tokens * (9 if z.tp > 1 else 8)


def shared_with_checkpoint(z: Sizes) -> float:
    """Return the bytes of a recomputed group that are counted as its checkpoint: the first norm's input."""
    return z.checkpoint


def core_recomputed(z: Sizes, half: SavedBytes) -> SavedBytes:
    """Return the half whose core attention is recomputed: its inputs stay, which flash attention keeps anyway."""
    return replace(half, core=0)


def up_recomputed(z: Sizes, half: SavedBytes) -> SavedBytes:
    """Return the half whose queries, keys and values are recomputed from the latents."""
    return replace(half, projected=0)
