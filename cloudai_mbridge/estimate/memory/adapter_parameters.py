"""Parameters and activations of adapters on a rank: two small matrices per linear layer, split as the layer is.

One table of the layers' shapes serves parameters, FLOPs and activations. Source: `training/peft`, and for
the layers Megatron-Core 0.16.
"""

from collections.abc import Iterator
from functools import lru_cache

from cloudai_mbridge.errors import BadInput, NotModelled
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import DORA, Adapters, ParallelLayout
from cloudai_mbridge.estimate.memory.linears import Linear, ParameterSplit, linears, split_of
from cloudai_mbridge.estimate.memory.parameters import (
    ADAPTERS,
    EXPERTS,
    Chunk,
    RankParameters,
    chunks_of,
    decoder_layers,
    padded_for,
    pipeline_chunks,
    prediction_layers,
)
from cloudai_mbridge.estimate.memory.sizes import Sizes


def adapters_per_stage(arch: Architecture, layout: ParallelLayout) -> tuple[RankParameters, ...]:
    """Return the parameters of adapters on a rank of every pipeline stage. BadInput: unsupported, or indivisible."""
    if layout.adapters is None:
        return (RankParameters({}),) * layout.pp
    layout.adapters.require_model()
    arch, split = padded_for(arch, layout.tp), split_of(layout)
    found = []
    for chunks in chunks_of(arch, layout):
        counts = [_chunk(arch, split, layout.adapters, chunk) for chunk in chunks]
        dense, experts = (sum(each) for each in zip(*counts, strict=True))
        found.append(RankParameters({ADAPTERS: dense, EXPERTS: experts}))
    return tuple(found)


def active_adapters(arch: Architecture, adapters: Adapters) -> int:
    """Return the weights of adapters that a token is multiplied by. BadInput as `adapters_per_stage`."""
    adapters.require_model()
    (chunk,) = pipeline_chunks(arch, 1, 1, None)[0]
    met = arch.moe_router_topk
    return sum(
        (met if linear.experts else 1) * _size(adapters, linear, _dim(adapters, linear, arch))
        for linear in _linears_of(arch, ParameterSplit(), chunk)
    )


def check_ranks(arch: Architecture, adapters: Adapters, split: ParameterSplit) -> None:
    """Raise BadInput for adapters that the ranks cannot split, or that their layers cannot have."""
    layers = (*decoder_layers(arch), *(layer for module in prediction_layers(arch) for layer in module))
    for half in {half for layer in layers for half in (layer.mixer, layer.ffn) if half}:
        for linear in _adapted(arch, split, half):
            if _chosen(adapters, linear):
                _dim(adapters, linear, arch)


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
    for linear in _adapted(z.arch, ParameterSplit(z.tp, 1, z.expert_tp, has_te), half):
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
            yield from _adapted(arch, split, half) if half else ()
    for _ in prediction:
        yield Linear("eh_proj", 2 * arch.hidden_size, arch.hidden_size, split.tp)


def _adapted(arch: Architecture, split: ParameterSplit, half: str) -> tuple[Linear, ...]:
    if half == "attention" and arch.experimental_attention_variant is not None:
        raise NotModelled(f"recipe {arch.recipe}: adapters of its attention are not modelled; choose another recipe")
    return linears(arch, split, half)
