"""Tensors that modules of the embedded loop save without Transformer Engine.

Every formula here is measured against saved-tensor hooks of a real step (tests/estimate/memory). It follows what torch
2.13 keeps on a CPU: its RMSNorm keeps input and normalised input in 32 bits, and every step of an unfused activation
keeps a tensor of its own.
"""

from dataclasses import replace

from cloudai_mbridge.errors import NotModelled
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.sizes import SavedBytes, Sizes


def norm(z: Sizes, tokens: float, width: int) -> float:
    """Return the bytes that a norm over `width` keeps, without its output."""
    if z.arch.normalization == "RMSNorm":
        return tokens * (8 * width + 4)
    return tokens * (z.value * width + 2 * z.value)


def attention(z: Sizes) -> SavedBytes:
    """Return the bytes that an attention half keeps."""
    if z.arch.multi_latent_attention:
        return _latent_attention(z)
    t, gate = z.tokens, z.query if z.arch.attention_output_gate else 0
    qkv = t * (z.query + 2 * z.key + gate) * z.value  # values (and the gate) are views of it
    rotated = t * (z.query + z.key) * z.value
    if not z.has_rope:  # keys are a view, queries too unless they are grouped
        rotated = t * z.query * z.value if z.query != z.key else 0
    norms = _head_norms(z) if z.arch.qk_layernorm else 0
    gathered = z.whole_sequence // z.sequence
    if gathered > 1:  # context parallelism: keys and values of the whole sequence, and no views
        is_view = not z.has_rope and z.query == z.key  # the queries, and with them the whole projection, are kept
        qkv = t * (z.query + (2 * z.key if is_view else 0) + gate) * z.value if gate or is_view else 0
        rotated = t * ((0 if is_view else z.query) + 2 * gathered * z.key) * z.value
    core, output = _core(z), t * z.query * z.value
    return SavedBytes(
        projected=qkv + rotated + norms + _rotation(z, z.arch.kv_channels),
        core=core,
        output=output * (3 if gate else 1),
    )


def _head_norms(z: Sizes) -> float:
    """Return the bytes that the norms of queries and keys keep; in 32 bits their inputs are views, unless grouped."""
    width, t = z.arch.kv_channels, z.tokens
    kept = norm(z, t * z.heads, width) + norm(z, t * z.key / width, width)
    if z.value < 4 and z.arch.normalization == "RMSNorm":
        return kept
    return kept - t * z.value * (z.key + (z.query if z.query == z.key else 0))


def _core(z: Sizes) -> float:
    """Return the bytes kept by scaled-dot-product attention without inputs and output: log-sums of the score rows."""
    has_mask = z.whole_sequence > z.sequence or z.arch.window_size is not None
    return z.tokens * z.heads * 4 + (z.sequence * z.whole_sequence * z.value if has_mask else 0)


def _rotation(z: Sizes, width: int) -> float:
    """Return the sines and cosines that queries and keys keep: one copy each, in every layer."""
    return 4 * z.sequence * width * z.value if z.has_rope else 0


def _latent_attention(z: Sizes) -> SavedBytes:
    """Heads of queries and values differ in width, so torch takes its plain path: 32 bits, with the scores."""
    a, t, s = z.arch, z.tokens, z.split_tokens
    wide, heads = z.latent_query, z.heads
    latents = s * (a.kv_lora_rank + (a.q_lora_rank or 0)) * z.value
    norms = 0.0
    if a.qk_layernorm:
        norms = norm(z, s, a.kv_lora_rank) + (norm(z, s, a.q_lora_rank) if a.q_lora_rank else 0)
    gathered = z.whole_sequence // z.sequence
    plain = 4 * t * heads * (wide + gathered * (wide + a.v_head_dim))
    scores = 4 * z.mbs * heads * z.sequence * z.whole_sequence
    return SavedBytes(
        latents=norms + latents,
        projected=_rotation(z, a.qk_pos_emb_head_dim),
        core=plain + scores,
        output=t * heads * a.v_head_dim * z.value,
    )


def mamba(z: Sizes) -> SavedBytes:
    """Raise NotModelled: Mamba."""
    what = "memory of Mamba layers without fused kernels"
    raise NotModelled(f"recipe {z.arch.recipe}: {what} is not modelled; name a GPU")


def core_recomputed(z: Sizes, half: SavedBytes) -> SavedBytes:
    """Return the half whose core attention is recomputed: its inputs stay."""
    inputs = 0
    if z.whole_sequence > z.sequence and not z.arch.multi_latent_attention:  # keys and values are not gathered yet
        own = attention(replace(z, whole_sequence=z.sequence))
        return replace(own, norm=half.norm, norm_output=half.norm_output, core=0)
    if z.arch.multi_latent_attention:
        inputs = z.tokens * z.heads * (2 * z.latent_query + z.arch.v_head_dim) * z.value
    return replace(half, projected=half.projected + inputs, core=0)


def _inner(z: Sizes, tokens: float, ffn: float, *, is_weighted: bool = False) -> float:
    """Return the bytes kept by an MLP without its input. is_weighted: an expert's, whose output is scaled per token."""
    # gated: both halves of the first product, the activation, the other half plus an offset, and their product
    kept = (5 if z.arch.gated_linear_unit else 2) * ffn
    return tokens * (kept + (ffn + 1 if is_weighted else 0)) * z.value


def mlp(z: Sizes) -> SavedBytes:
    """Return the bytes that a dense feed-forward half keeps."""
    return SavedBytes(ffn=_inner(z, z.tokens, z.arch.ffn_hidden_size / z.tp))


def moe(z: Sizes) -> SavedBytes:
    """Return the bytes that a mixture of experts keeps; the experts run one after the other."""
    a, s = z.arch, z.split_tokens
    inner = _inner(z, z.expert_tokens, (a.moe_ffn_hidden_size or a.ffn_hidden_size) / z.expert_tp, is_weighted=True)
    shared = a.moe_shared_expert_intermediate_size
    return SavedBytes(
        router=s * _routing(a, z.value),
        experts=z.expert_tokens * a.hidden_size * z.value + inner,
        shared=_inner(z, z.tokens, shared / z.tp) if shared else 0,
    )


def _routing(a: Architecture, value: int) -> float:
    """Return the bytes per token of choosing experts: indices, weights, a map, a sorted copy; the balancing loss."""
    experts, k = a.num_moe_experts or 0, a.moe_router_topk
    balance = 4 * experts + 8 * k if a.moe_aux_loss_coeff else 0
    return (8 + 4) * k + experts * (1 + value) + 8 * k + balance


def head(z: Sizes, depths: int) -> float:
    """Return the bytes kept by the output layer and the loss; depths: 1 and one per token predicted beyond the next."""
    a = z.arch
    logits = z.tokens * (a.padded_vocab_size // z.tp * 4 + 1 + 8)
    return depths * (z.split_tokens * a.hidden_size * z.value + logits) + (depths - 1) * 8 * z.tokens


def embedding(z: Sizes) -> float:
    """Return the bytes that the embedding keeps: the tokens, and the mask of other ranks' tokens."""
    positions = 8 if z.arch.position_embedding_type == "learned_absolute" else 0
    return z.tokens * (8 + positions + (1 if z.tp > 1 else 0))


def shared_with_checkpoint(z: Sizes) -> float:
    """Return the bytes of a recomputed group that are counted as its checkpoint."""
    is_copied = z.arch.normalization == "RMSNorm" and z.value < 4
    return 0 if is_copied else z.checkpoint


def up_recomputed(z: Sizes, half: SavedBytes) -> SavedBytes:
    """Return the half whose queries, keys and values are recomputed: attention keeps 32-bit copies where possible."""
    views = z.tokens * z.heads * z.arch.v_head_dim * z.value if z.value == 4 else 0
    return replace(half, projected=0, core=max(0.0, half.core - views))
