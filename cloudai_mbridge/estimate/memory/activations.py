"""Activations of every pipeline stage: what its micro-batches in flight keep for their backward passes, at the peak.

With recomputation the peak is either the moment when the last forward pass of a micro-batch ends, or the moment in its
backward pass when a recomputed part is whole again: by then what lies behind it has been freed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import mul
from types import ModuleType

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory import saved_fused, saved_torch
from cloudai_mbridge.estimate.memory.layout import Granularity, Implementation, ParallelLayout, Recompute
from cloudai_mbridge.estimate.memory.parameters import padded_for
from cloudai_mbridge.estimate.memory.sizes import SavedBytes, Sizes, sizes_of
from cloudai_mbridge.estimate.memory.stages import Chunk, Ffn, Layer, Mixer, chunks_of

Moment = tuple[tuple[int, ...], int]
TERMS = ("attention", "mlp", "experts", "checkpoints", "embedding", "logits")


@dataclass(frozen=True)
class ChunkSaved:
    """What one micro-batch of a chunk keeps, by term; and by how much its backward pass exceeds that.

    recomputed: bytes beyond the terms at the fullest moment of the backward pass; 0 if the end of the forward pass is
    fuller.
    """

    terms: Mapping[str, float]
    recomputed: float

    @cached_property
    def total(self) -> float:
        """All terms, without what is recomputed."""
        return sum(self.terms.values())


def activations_per_stage(arch: Architecture, layout: ParallelLayout) -> tuple[dict[str, float], ...]:
    """Return the bytes of every term of every stage, at the fullest moment of the stage's schedule."""
    arch = padded_for(arch, layout.tp)
    z = sizes_of(arch, layout)
    seen: dict[object, dict[str, float]] = {}
    stages = []
    for rank, chunks in enumerate(chunks_of(arch, layout)):
        moments = in_flight(
            layout.pp,
            rank,
            len(chunks),
            layout.num_microbatches,
            has_extra_warmup=layout.overlap_moe_expert_parallel_comm,
        )
        if (chunks, moments) not in seen:
            seen[chunks, moments] = _stage(z, layout, chunks, moments)
        stages.append(seen[chunks, moments])
    return tuple(stages)


def _stage(
    z: Sizes, layout: ParallelLayout, chunks: tuple[Chunk, ...], moments: tuple[Moment, ...]
) -> dict[str, float]:
    is_fused = layout.implementation is Implementation.FUSED
    offload = Offload(layout.activation_offload_layers, "moe_act" in layout.offload_modules)
    saved = [chunk_saved(z, layout.recompute, is_fused, offload, chunk) for chunk in chunks]

    totals, recomputed = [chunk.total for chunk in saved], [chunk.recomputed for chunk in saved]

    def fullness(moment: Moment) -> float:
        return float(sum(map(mul, moment[0], totals)) + recomputed[moment[1]])

    counts, backward = max(moments, key=fullness) if len(moments) > 1 else moments[0]
    terms = {name: sum(n * chunk.terms[name] for n, chunk in zip(counts, saved, strict=True)) for name in TERMS}
    terms["checkpoints"] += _angles(z) * sum(chunk.terms["checkpoints"] > 0 for chunk in saved)
    return terms | {"recomputed": saved[backward].recomputed}


@dataclass(frozen=True)
class Offload:
    """What lives in host memory: the first layers of a chunk; what the experts' activation functions read."""

    layers: int = 0
    has_moe_act: bool = False


@lru_cache(maxsize=8192)
def chunk_saved(z: Sizes, recompute: Recompute, is_fused: bool, offload: Offload, chunk: Chunk) -> ChunkSaved:
    """Return what one micro-batch keeps in a chunk."""
    module = saved_fused if is_fused else saved_torch
    terms = dict.fromkeys(TERMS, 0.0)
    is_full = recompute.granularity is Granularity.FULL
    groups = _groups(recompute, len(chunk.layers)) if is_full else [(1, False)] * len(chunk.layers)
    offloaded = min(offload.layers, max(0, len(chunk.layers) - 1))
    regrown: list[tuple[float, float]] = []  # of every group: what it keeps, and by how much it grows
    whole = {layer: _halves(z, module, layer) for layer in set(chunk.layers)}
    kept_of = {layer: _kept(z, module, recompute, layer) for layer in whole}
    totals = {layer: _total(halves) for layer, halves in whole.items()}
    growth = {layer: (_total(kept), _regrown(whole[layer], kept)) for layer, kept in kept_of.items()}
    position = 0
    for size, is_checkpointed in groups:
        layers = chunk.layers[position : position + size]
        position += size
        if is_checkpointed:
            left = z.checkpoint
            grows = sum(totals[layer] for layer in layers) - module.shared_with_checkpoint(z)
            terms["checkpoints"] += left if position > offloaded else 0
        else:
            left, grows = growth[layers[0]]
            if position > offloaded:
                _add(terms, layers[0], kept_of[layers[0]], offload)
        regrown.append((left, grows))
    behind, most = _ends(z, module, recompute, chunk, terms), 0.0
    for left, grows in reversed(regrown):  # as the backward pass goes
        most = max(most, grows - behind)
        behind += left
    return ChunkSaved(terms, most)


def _ends(z: Sizes, module: ModuleType, recompute: Recompute, chunk: Chunk, terms: dict[str, float]) -> float:
    """Add what lies around the layers; return what of it is freed before a layer's backward pass begins."""
    terms["embedding"] += module.embedding(z) if chunk.has_embedding else 0
    end = module.norm(z, z.split_tokens, z.arch.hidden_size) if chunk.has_decoder_end else 0
    for layers in chunk.mtp:
        end += _prediction(z, module, recompute, layers)
    head = module.head(z, 1 + len(chunk.mtp)) if chunk.has_output else 0.0
    terms["logits"] += head + end
    return float(head + end)


def _prediction(z: Sizes, module: ModuleType, recompute: Recompute, layers: tuple[Layer, ...]) -> float:
    """Return what a multi-token-prediction module keeps. Megatron-Core recomputes it only by the uniform method."""
    if recompute.granularity is Granularity.FULL and recompute.method == "uniform":
        return 2 * z.checkpoint
    return float(module.prediction(z)) + sum(_total(_kept(z, module, recompute, layer)) for layer in layers)


def _angles(z: Sizes) -> float:
    """Return the 32-bit rotation angles, which the checkpoints of a chunk keep one copy of."""
    return 4.0 * z.sequence * z.arch.kv_channels if z.has_rope and not z.arch.multi_latent_attention else 0.0


def _groups(recompute: Recompute, layers: int) -> list[tuple[int, bool]]:
    """Return number of layers, and whether they are recomputed, of every group that is kept or recomputed as one."""
    n = recompute.num_layers
    if recompute.method == "uniform":
        return [(min(n, layers - start), True) for start in range(0, layers, n)]
    return [(1, index < n) for index in range(layers)]


def _halves(z: Sizes, module: ModuleType, layer: Layer) -> tuple[SavedBytes | None, SavedBytes | None]:
    mixers = {Mixer.ATTENTION: module.attention, Mixer.MAMBA: getattr(module, "mamba", _no_mamba), None: _nothing}
    ffns = {Ffn.MLP: module.mlp, Ffn.MOE: module.moe, None: _nothing}
    return mixers[layer.mixer](z), ffns[layer.ffn](z)


def _nothing(z: Sizes) -> None:
    return None


def _no_mamba(z: Sizes) -> SavedBytes:
    raise BadInput(f"recipe {z.arch.recipe}: the embedded loop builds no Mamba layers; use implementation fused")


def _kept(
    z: Sizes, module: ModuleType, recompute: Recompute, layer: Layer
) -> tuple[SavedBytes | None, SavedBytes | None]:
    """Return what is left of a layer where its modules are recomputed selectively."""
    mixer, ffn = _halves(z, module, layer)
    if recompute.granularity is not Granularity.SELECTIVE:
        return mixer, ffn
    if mixer and layer.mixer is Mixer.ATTENTION and recompute.has("core_attn"):
        mixer = module.core_recomputed(z, mixer)
    if mixer and mixer.latents and recompute.has("mla_up_proj"):
        mixer = module.up_recomputed(z, mixer)
    if recompute.has("layernorm"):
        mixer, ffn = (half and replace(half, norm=z.checkpoint, norm_output=0) for half in (mixer, ffn))
    freed = {field for module_name, fields in _FREED.items() if recompute.has(module_name) for field in fields}
    return mixer, ffn and replace(ffn, **dict.fromkeys(freed, 0.0))


_FREED = {
    "mlp": ("ffn",),
    "moe": ("router", "experts", "expert_hidden", "expert_activation", "shared"),
    "moe_act": ("expert_activation",),
    "shared_experts": ("shared",),
}


def _total(halves: tuple[SavedBytes | None, ...]) -> float:
    return sum(half.total for half in halves if half is not None)


def _regrown(whole: tuple[SavedBytes | None, ...], kept: tuple[SavedBytes | None, ...]) -> float:
    """Return by how much the layer grows in its backward pass, from the second half to the first."""
    most, behind = 0.0, 0.0
    for full, left in zip(reversed(whole), reversed(kept), strict=True):
        if full is not None and left is not None:
            most = max(most, full.total - left.total - behind)
            behind += left.total
    return most


def _add(terms: dict[str, float], layer: Layer, kept: tuple[SavedBytes | None, ...], offload: Offload) -> None:
    mixer, ffn = kept
    terms["attention"] += mixer.total if mixer else 0
    if ffn:
        away = ffn.expert_hidden if offload.has_moe_act else 0
        terms["experts" if layer.ffn is Ffn.MOE else "mlp"] += ffn.total - away


# How many micro-batches of every model chunk a pipeline rank holds at a time, by the schedules of Megatron-Core 0.16:
# `pipeline_parallel/schedules.py`, `get_pp_rank_microbatches` and `get_schedule_table`. The group size per virtual
# stage is Megatron-Core's default, pp.
def in_flight(
    pp: int, rank: int, vp: int, num_microbatches: int, *, has_extra_warmup: bool = False
) -> tuple[Moment, ...]:
    """Return the fullest moments of a rank: micro-batches in flight by chunk, and whose backward pass begins.

    A moment that another one with the same backward pass exceeds in every chunk is left out. has_extra_warmup: of
    overlapped expert communication.
    """
    if vp == 1 or pp == 1:
        return (((min(num_microbatches, pp - rank),), 0),)
    full_groups, rest = divmod(num_microbatches, pp)
    return _interleaved(pp, rank, vp, min(full_groups, 4) * pp + rest, has_extra_warmup)  # then it repeats


@lru_cache(maxsize=4096)
def _interleaved(pp: int, rank: int, vp: int, num_microbatches: int, has_extra_warmup: bool) -> tuple[Moment, ...]:
    forward = _chunk_order(pp, vp, num_microbatches)
    warmup = min(2 * (pp - rank - 1) + (vp - 1) * pp + has_extra_warmup, len(forward))
    counts = [forward[:warmup].count(chunk) for chunk in range(vp)]
    moments: set[Moment] = set()
    for done, chunk in enumerate(forward):
        if warmup + done < len(forward):  # afterwards only backward passes are left
            counts[forward[warmup + done]] += 1
        backward = vp - 1 - chunk  # they take the chunks in the opposite order
        moments.add((tuple(counts), backward))
        counts[backward] -= 1
    return tuple(sorted(m for m in moments if not any(_exceeds(other, m) for other in moments)))


def _chunk_order(pp: int, vp: int, num_microbatches: int) -> list[int]:
    """Return the chunk of every forward pass: groups of pp micro-batches, each through all chunks."""
    order: list[int] = []
    for start in range(0, num_microbatches, pp):
        group = min(pp, num_microbatches - start)
        order += [chunk for chunk in range(vp) for _ in range(group)]
    return order


def _exceeds(one: Moment, other: Moment) -> bool:
    is_more = all(a >= b for a, b in zip(one[0], other[0], strict=True))
    return is_more and one != other and one[1] == other[1]
