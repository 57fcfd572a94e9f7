"""Parameters and activations of adapters on a rank: two small matrices per linear layer, split as the layer is.

One table of the layers' shapes serves parameters, FLOPs and activations. Source: `training/peft`, and for
the layers Megatron-Core 0.16.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import DORA, Adapters, ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import (
    ADAPTERS,
    EXPERTS,
    Chunk,
    ParameterSplit,
    RankParameters,
    chunks_of,
    padded_for,
    pipeline_chunks,
    split_of,
)
from cloudai_mbridge.estimate.memory.sizes import Sizes


class Linear(NamedTuple):
    """A linear layer of the whole model, over `ranks` of which its output is split, or its input (is_row).

    parts: name and outputs of those of a fused layer. experts: of routed experts on this rank, 0 for another layer.
    has_split_tokens: its input is not gathered over the tensor-parallel ranks.
    """

    name: str
    inputs: int
    outputs: int
    ranks: int
    is_row: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    experts: int = 0
    has_split_tokens: bool = False


def adapters_per_stage(arch: Architecture, layout: ParallelLayout) -> tuple[RankParameters, ...]:
    """Return the parameters of adapters on a rank of every pipeline stage. BadInput: unsupported, or indivisible."""
    if layout.adapters is None:
        return (RankParameters({}),) * layout.pp
    arch, split = padded_for(arch, layout.tp), split_of(layout)
    return tuple(_rank(arch, split, layout.adapters, chunks) for chunks in chunks_of(arch, layout))


def active_adapters(arch: Architecture, adapters: Adapters) -> int:
    """Return the weights of adapters that a token is multiplied by. BadInput as `adapters_per_stage`."""
    (chunk,) = pipeline_chunks(arch, 1, 1, None)[0]
    met = arch.moe_router_topk
    return sum(
        (met if linear.experts else 1) * _size(adapters, linear, _dim(adapters, linear, arch))
        for linear in _linears_of(arch, ParameterSplit(), chunk)
    )


def _rank(arch: Architecture, split: ParameterSplit, adapters: Adapters, chunks: tuple[Chunk, ...]) -> RankParameters:
    counts = [_chunk(arch, split, adapters, chunk) for chunk in chunks]
    return RankParameters({ADAPTERS: sum(dense for dense, _ in counts), EXPERTS: sum(experts for _, experts in counts)})


@lru_cache(maxsize=4096)
def _chunk(arch: Architecture, split: ParameterSplit, adapters: Adapters, chunk: Chunk) -> tuple[int, int]:
    """Return the parameters of a chunk's adapters: reduced over all data-parallel ranks, and over experts' only."""
    dense = experts = 0
    for linear in _linears_of(arch, split, chunk):
        dim = _dim(adapters, linear, arch)
        if linear.experts and split.has_te and adapters.share_expert_adapters:  # one for all, whole on every rank
            dense += _size(adapters, linear._replace(ranks=1), dim)
        elif linear.experts:
            experts += linear.experts * _size(adapters, linear, dim, is_grouped=split.has_te)
        else:
            dense += _size(adapters, linear, dim)
    return dense, experts


def _size(adapters: Adapters, linear: Linear, dim: int, *, is_grouped: bool = True) -> int:
    """Return the parameters on a rank of the adapters of a layer, or of one expert of it."""
    is_whole = bool(linear.experts) and is_grouped
    parts = () if is_whole else linear.parts
    chosen = _chosen(adapters, linear, is_whole=is_whole)
    outputs = dict(parts)
    size = sum(dim * (linear.inputs + outputs.get(part, linear.outputs)) // linear.ranks for part in chosen)
    return size + (linear.outputs // (1 if linear.is_row else linear.ranks) if chosen and adapters.kind == DORA else 0)


def _chosen(adapters: Adapters, linear: Linear, *, is_whole: bool = False) -> tuple[str, ...]:
    chosen = adapters.parts_of(linear.name, () if is_whole else tuple(name for name, _ in linear.parts))
    if chosen and adapters.kind == DORA and (linear.experts or linear.name == "router"):
        raise BadInput(f"peft = DoRA: {linear.name} belongs to routed experts, which DoRA does not adapt; use LoRA")
    return chosen


def _dim(adapters: Adapters, linear: Linear, arch: Architecture) -> int:
    """Return the rank of the product; of experts it may be a part, rounded up to a size that the layout can split."""
    dim, ranks = adapters.dim, 1 if linear.is_row else linear.ranks
    if linear.experts and adapters.normalize_moe_lora:
        if dim % arch.moe_router_topk:
            raise BadInput(f"peft.dim = {dim} is not a multiple of model.moe_router_topk = {arch.moe_router_topk}")
        return -(-(dim // arch.moe_router_topk) // ranks) * ranks
    if dim % ranks and _chosen(adapters, linear):
        raise BadInput(
            f"peft.dim = {dim} cannot be split over {ranks} tensor-parallel ranks; use a multiple of {ranks}"
        )
    return dim


def adapter_bytes(z: Sizes, half: str, *, has_te: bool) -> float:
    """Return the bytes that a layer half's adapters save for the backward pass, without the inputs of their layers.

    These are the input of the second matrix; with a split sequence, the remaining gathered input of the first matrix;
    with DoRA, the output that the magnitudes scale.
    """
    if z.adapters is None:
        return 0.0
    found = 0.0
    for linear in linears(z.arch, ParameterSplit(z.tp, 1, z.expert_tp, has_te), half):
        chosen = _chosen(z.adapters, linear, is_whole=bool(linear.experts) and has_te)
        rows = z.expert_tokens if linear.experts else z.split_tokens if linear.has_split_tokens else z.tokens
        values = len(chosen) * rows * _dim(z.adapters, linear, z.arch)
        is_gathered = not (linear.is_row or linear.experts or linear.has_split_tokens)
        if chosen and is_gathered and not z.adapters.sequence_parallel_input_regather:
            values += (z.tokens - z.split_tokens) * linear.inputs
        if chosen and z.adapters.kind == DORA:
            values += (z.split_tokens if linear.is_row else rows / linear.ranks) * linear.outputs
        found += values * z.value
    return found


def _linears_of(arch: Architecture, split: ParameterSplit, chunk: Chunk) -> Iterator[Linear]:
    prediction = chunk.mtp[: 1 if arch.mtp_use_repeated_layer else None]
    for layer in (*chunk.layers, *(layer for module in prediction for layer in module)):
        for half in (layer.mixer, layer.ffn):
            yield from linears(arch, split, half) if half else ()
    for _ in prediction:
        yield Linear("eh_proj", 2 * arch.hidden_size, arch.hidden_size, split.tp)


@lru_cache(maxsize=1024)
def linears(arch: Architecture, split: ParameterSplit, half: str) -> tuple[Linear, ...]:
    """Return the linear layers of a mixer or feed-forward network: attention, mamba, mlp or moe."""
    return tuple(_HALVES[half](arch, split))


def _attention(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    if arch.experimental_attention_variant is not None:
        raise BadInput(f"recipe {arch.recipe}: adapters of its attention are not modelled; choose another recipe")
    if arch.multi_latent_attention:
        yield from _latent_attention(arch, split)
        return
    h, q, kv = arch.hidden_size, arch.kv_channels * arch.num_attention_heads, arch.kv_channels * arch.num_query_groups
    outputs = q + 2 * kv + (q if arch.attention_output_gate else 0)
    parts = (("linear_q", q), ("linear_k", kv), ("linear_v", kv))
    yield Linear("linear_qkv", h, outputs, split.tp, parts=parts)
    yield Linear("linear_proj", q, h, split.tp, is_row=True)


def _latent_attention(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    h, a, r_q, r_kv = arch.hidden_size, arch.num_attention_heads, arch.q_lora_rank, arch.kv_lora_rank
    d_q = arch.qk_head_dim + arch.qk_pos_emb_head_dim
    down, whole = 1 if split.has_te else split.tp, split.has_te
    if r_q is None:
        yield Linear("linear_q_proj", h, a * d_q, split.tp)
    else:
        yield Linear("linear_q_down_proj", h, r_q, down, has_split_tokens=whole)
        yield Linear("linear_q_up_proj", r_q, a * d_q, split.tp)
    yield Linear("linear_kv_down_proj", h, r_kv + arch.qk_pos_emb_head_dim, down, has_split_tokens=whole)
    yield Linear("linear_kv_up_proj", r_kv, a * (arch.qk_head_dim + arch.v_head_dim), split.tp)
    yield Linear("linear_proj", a * arch.v_head_dim, h, split.tp, is_row=True)


def _mamba(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    heads = arch.mamba_num_heads or 2 * arch.hidden_size // arch.mamba_head_dim
    inner, states = heads * arch.mamba_head_dim, 2 * arch.mamba_num_groups * arch.mamba_state_dim
    yield Linear("in_proj", arch.hidden_size, 2 * inner + states + heads, split.tp)
    yield Linear("out_proj", inner, arch.hidden_size, split.tp, is_row=True)


def _mlp(arch: Architecture, ffn: int, ranks: int, width: int | None = None, experts: int = 0) -> Iterator[Linear]:
    width = arch.hidden_size if width is None else width
    gated = (("linear_fc1_gate", ffn), ("linear_fc1_up", ffn)) if arch.gated_linear_unit else ()
    yield Linear("linear_fc1", width, ffn * (len(gated) or 1), ranks, parts=gated, experts=experts)
    yield Linear("linear_fc2", ffn, width, ranks, is_row=True, experts=experts)


def _moe(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    h, experts, latent = arch.hidden_size, arch.num_moe_experts or 0, arch.moe_latent_size
    yield Linear("router", h, experts, 1, has_split_tokens=True)
    yield from _mlp(arch, arch.moe_ffn_hidden_size or arch.ffn_hidden_size, split.etp, latent, experts // split.ep)
    if latent:
        yield Linear("fc1_latent_proj", h, latent, 1, has_split_tokens=True)
        yield Linear("fc2_latent_proj", latent, h, 1, has_split_tokens=True)
    if arch.moe_shared_expert_intermediate_size:
        yield from _mlp(arch, arch.moe_shared_expert_intermediate_size, split.tp)


_HALVES = {
    "attention": _attention,
    "mamba": _mamba,
    "mlp": lambda arch, split: _mlp(arch, arch.ffn_hidden_size, split.tp),
    "moe": _moe,
}
