"""Activations of every pipeline stage: kept by its micro-batches in flight for their backward passes, at the peak.

With recomputation the peak is either the moment when the last forward pass of a micro-batch ends, or the moment in its
backward pass when a recomputed part is complete again: by then the activations after it have been freed.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from operator import ge, mul
from types import ModuleType

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory import saved_fused, saved_torch
from cloudai_mbridge.estimate.memory.adapter_parameters import adapter_bytes
from cloudai_mbridge.estimate.memory.layout import Granularity, Implementation, ParallelLayout, Recompute
from cloudai_mbridge.estimate.memory.parameters import Chunk, Layer, chunks_of, padded_for
from cloudai_mbridge.estimate.memory.sizes import SavedBytes, Sizes, sizes_of

Moment = tuple[tuple[int, ...], int]
Halves = tuple[SavedBytes | None, SavedBytes | None]
TERMS = ("attention", "mlp", "experts", "checkpoints", "embedding", "logits")


def activations_per_stage(arch: Architecture, layout: ParallelLayout) -> tuple[dict[str, float], ...]:
    """Return the bytes of every term of every stage, at the fullest moment of the stage's schedule."""
    arch = padded_for(arch, layout.tp)
    z, pp, count = sizes_of(arch, layout), layout.pp, layout.num_microbatches
    seen: dict[object, dict[str, float]] = {}
    stages = []
    for rank, chunks in enumerate(chunks_of(arch, layout)):
        is_overlapped = layout.overlap_moe_expert_parallel_comm
        moments = in_flight(pp, rank, len(chunks), count, has_extra_warmup=is_overlapped)
        if (chunks, moments) not in seen:
            seen[chunks, moments] = _stage(z, layout, chunks, moments)
        stages.append(seen[chunks, moments])
    return tuple(stages)


def _stage(
    z: Sizes, layout: ParallelLayout, chunks: tuple[Chunk, ...], moments: tuple[Moment, ...]
) -> dict[str, float]:
    module = saved_fused if layout.implementation is Implementation.FUSED else saved_torch
    offloads_moe_act = "moe_act" in layout.offload_modules
    offloaded = layout.activation_offload_layers
    saved = [_chunk_saved(z, layout.recompute, module, offloaded, offloads_moe_act, chunk) for chunk in chunks]
    totals = [total for total, _ in saved]

    def fullness(moment: Moment) -> float:
        return float(sum(map(mul, moment[0], totals)) + saved[moment[1]][1]["recomputed"])

    counts, backward = max(moments, key=fullness) if len(moments) > 1 else moments[0]
    terms = {name: sum(n * chunk[name] for n, (_, chunk) in zip(counts, saved, strict=True)) for name in TERMS}
    if z.has_rope and not z.arch.multi_latent_attention:  # checkpoints of a chunk keep the 32-bit rotation angles once
        angles = 4.0 * z.sequence * z.arch.kv_channels
        terms["checkpoints"] += angles * sum(chunk["checkpoints"] > 0 for _, chunk in saved)
    return terms | {"recomputed": saved[backward][1]["recomputed"]}


@lru_cache(maxsize=8192)
def _chunk_saved(
    z: Sizes, recompute: Recompute, module: ModuleType, offloaded: int, offloads_moe_act: bool, chunk: Chunk
) -> tuple[float, Mapping[str, float]]:
    """Return the bytes that one micro-batch keeps in a chunk, in total and by term, and "recomputed" beyond them.

    recomputed: at the peak of the backward pass; 0 if the end of the forward pass is fuller.
    offloaded: number of first layers of a chunk in host memory, except the last layer. offloads_moe_act: the inputs of
    the experts' activation functions are there, too.
    """
    terms = dict.fromkeys(TERMS, 0.0)
    is_full = recompute.granularity is Granularity.FULL
    groups = _groups(recompute, len(chunk.layers)) if is_full else [(1, False)] * len(chunk.layers)
    offloaded = min(offloaded, max(0, len(chunk.layers) - 1))
    regrown: list[tuple[float, float]] = []  # of every group: bytes kept, and growth
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
                _add(terms, layers[0], kept_of[layers[0]], offloads_moe_act)
        regrown.append((left, grows))
    behind, most = _ends(z, module, recompute, chunk, terms), 0.0
    for left, grows in reversed(regrown):  # as the backward pass goes
        most = max(most, grows - behind)
        behind += left
    return sum(terms.values()), terms | {"recomputed": most}


def _ends(z: Sizes, module: ModuleType, recompute: Recompute, chunk: Chunk, terms: dict[str, float]) -> float:
    """Add the terms outside the layers; return the bytes of them freed before a layer's backward pass begins."""
    terms["embedding"] += module.embedding(z) if chunk.has_embedding else 0
    end = module.norm(z, z.split_tokens, z.arch.hidden_size) if chunk.has_decoder_end else 0
    for layers in chunk.mtp:
        end += _prediction(z, module, recompute, layers)
    head = module.head(z, 1 + len(chunk.mtp)) if chunk.has_output else 0.0
    terms["logits"] += head + end
    return float(head + end)


def _prediction(z: Sizes, module: ModuleType, recompute: Recompute, layers: tuple[Layer, ...]) -> float:
    """Return the bytes of a multi-token-prediction module. Megatron-Core recomputes it only by the uniform method."""
    if recompute.granularity is Granularity.FULL and recompute.method == "uniform":
        return 2 * z.checkpoint
    h, s = z.arch.hidden_size, z.split_tokens
    around = (
        module.embedding(z) + 3 * module.norm(z, s, h) + 2 * h * s * z.kept("eh_proj")
    )  # three norms and a projection
    return float(around) + sum(_total(_kept(z, module, recompute, layer)) for layer in layers)


def _groups(recompute: Recompute, layers: int) -> list[tuple[int, bool]]:
    """Return number of layers, and whether they are recomputed, of every group that is kept or recomputed as one."""
    n = recompute.num_layers
    if recompute.method == "uniform":
        return [(min(n, layers - start), True) for start in range(0, layers, n)]
    return [(1, index < n) for index in range(layers)]


def _halves(z: Sizes, module: ModuleType, layer: Layer) -> Halves:
    return _half(z, module, layer.mixer), _half(z, module, layer.ffn)


def _half(z: Sizes, module: ModuleType, name: str | None) -> SavedBytes | None:
    """Return the bytes that a mixer or feed-forward network and the norm before it keep."""
    if name is None:
        return None
    h, s = z.arch.hidden_size, z.split_tokens
    # the router keeps it in 16 bits
    kept_input = z.value if name == "moe" else max(map(z.kept, _READS_NORM[name]))
    inside: SavedBytes = getattr(module, name)(z)
    adapters = adapter_bytes(z, name, has_te=module is saved_fused)
    copies = z.gathered_copies if name != "moe" and kept_input == z.kept_input else 1
    return replace(inside, norm=module.norm(z, s, h), norm_output=s * h * kept_input * copies, adapters=adapters)


# The linear layers of a half that read the norm's output
_READS_NORM = {
    "attention": ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"),
    "mamba": ("in_proj",),
    "mlp": ("linear_fc1",),
}


def _kept(z: Sizes, module: ModuleType, recompute: Recompute, layer: Layer) -> Halves:
    """Return the bytes that a layer keeps if its modules are recomputed selectively."""
    mixer, ffn = _halves(z, module, layer)
    if recompute.granularity is not Granularity.SELECTIVE:
        return mixer, ffn
    if mixer and layer.mixer == "attention" and recompute.has("core_attn"):
        mixer = module.core_recomputed(z, mixer)
    if mixer and mixer.latents and recompute.has("mla_up_proj"):
        mixer = module.up_recomputed(z, mixer)
    if recompute.has("layernorm"):
        # Transformer Engine computes the others together with the product that reads them
        names = {"attention", "mamba", "mlp", "moe"} if module is saved_torch else {"moe"}
        names |= {"attention"} if z.arch.multi_latent_attention else set()
        halves = (layer.mixer, mixer), (layer.ffn, ffn)
        mixer, ffn = (
            replace(half, norm=z.checkpoint, norm_output=0) if half and name in names else half for name, half in halves
        )
    freed = {field for module_name, fields in _FREED.items() if recompute.has(module_name) for field in fields}
    return mixer, ffn and replace(ffn, **dict.fromkeys(freed, 0.0))


_FREED = {
    "mlp": ("ffn",),
    "moe": ("router", "experts", "expert_hidden", "expert_activation", "shared"),
    "moe_act": ("expert_activation",),
    "shared_experts": ("shared",),
}


def _total(halves: Halves) -> float:
    return sum(half.total for half in halves if half is not None)


def _regrown(whole: Halves, kept: Halves) -> float:
    """Return the growth of the layer in its backward pass, from the second half to the first."""
    most, behind = 0.0, 0.0
    for full, left in zip(reversed(whole), reversed(kept), strict=True):
        if full is not None and left is not None:
            most = max(most, full.total - left.total - behind)
            behind += left.total
    return most


def _add(terms: dict[str, float], layer: Layer, kept: Halves, offloads_moe_act: bool) -> None:
    mixer, ffn = kept
    terms["attention"] += mixer.total if mixer else 0
    if ffn:
        away = ffn.expert_hidden if offloads_moe_act else 0
        terms["experts" if layer.ffn == "moe" else "mlp"] += ffn.total - away


# Micro-batches of every model chunk that a pipeline rank holds at a time, by the schedules of Megatron-Core 0.16:
# `pipeline_parallel/schedules.py`, `get_pp_rank_microbatches` and `get_schedule_table`. The group size per virtual
# stage is Megatron-Core's default, pp.
def in_flight(
    pp: int, rank: int, vp: int, num_microbatches: int, *, has_extra_warmup: bool = False
) -> tuple[Moment, ...]:
    """Return the fullest moments of a rank: micro-batches in flight by chunk, and whose backward pass begins.

    A moment that another with the same backward pass exceeds in every chunk is left out. has_extra_warmup: of
    overlapped expert communication.
    """
    if vp == 1 or pp == 1:
        return (((min(num_microbatches, pp - rank),), 0),)
    full_groups, rest = divmod(num_microbatches, pp)
    return _interleaved(pp, rank, vp, min(full_groups, 4) * pp + rest, has_extra_warmup)  # then it repeats


@lru_cache(maxsize=4096)
def _interleaved(pp: int, rank: int, vp: int, num_microbatches: int, has_extra_warmup: bool) -> tuple[Moment, ...]:
    forward: list[int] = []  # the chunk of every forward pass: groups of pp micro-batches, each through all chunks
    for start in range(0, num_microbatches, pp):
        group = min(pp, num_microbatches - start)
        forward += [chunk for chunk in range(vp) for _ in range(group)]
    warmup = min(2 * (pp - rank - 1) + (vp - 1) * pp + has_extra_warmup, len(forward))
    counts = [forward[:warmup].count(chunk) for chunk in range(vp)]
    moments: dict[int, set[tuple[int, ...]]] = {chunk: set() for chunk in range(vp)}  # by whose backward pass begins
    for done, chunk in enumerate(forward):
        if warmup + done < len(forward):  # afterwards only backward passes are left
            counts[forward[warmup + done]] += 1
        backward = vp - 1 - chunk  # they take the chunks in the opposite order
        moments[backward].add(tuple(counts))
        counts[backward] -= 1

    def is_exceeded(counts: tuple[int, ...], alike: set[tuple[int, ...]]) -> bool:
        return any(all(map(ge, other, counts)) for other in alike if other != counts)

    return tuple(
        sorted(
            (counts, backward)
            for backward, alike in moments.items()
            for counts in alike
            if not is_exceeded(counts, alike)
        )
    )
