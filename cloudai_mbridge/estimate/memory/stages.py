"""The layers of every pipeline stage and virtual stage, as Megatron-Core 0.16 splits them.

Source: `transformer_block.get_num_layers_to_build`, `pipeline_parallel_layer_layout`, `mamba_hybrid_layer_allocation`.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.models.pipeline_layout import layout_fault, parse_layout
from cloudai_mbridge.training.flops import moe_layer_pattern


@dataclass(frozen=True)
class Layer:
    """A transformer layer has both parts, a block of a hybrid model one of them.

    mixer: the sublayer across tokens. ffn: the sublayer of single tokens. `saved_fused` and `saved_torch` have a
    function of each name.
    """

    mixer: Literal["attention", "mamba"] | None
    ffn: Literal["mlp", "moe"] | None


@dataclass(frozen=True, eq=False)
class Chunk:
    """The part of the model on one virtual stage of one rank. Equal parts are one object, hashed by identity.

    mtp: the layers of every multi-token-prediction module. has_decoder_end: the norm behind the last decoder layer.
    """

    layers: tuple[Layer, ...]
    mtp: tuple[tuple[Layer, ...], ...] = ()
    has_embedding: bool = False
    has_decoder_end: bool = False
    has_output: bool = False

    @cached_property
    def kinds(self) -> frozenset[Layer]:
        """The distinct layers, including multi-token prediction."""
        return frozenset(layer for group in (self.layers, *self.mtp) for layer in group)

    @cached_property
    def has_experts(self) -> bool:
        """Whether it contains a mixture of experts."""
        return any(layer.ffn == "moe" for layer in self.kinds)


_DENSE, _EXPERTS = Layer("attention", "mlp"), Layer("attention", "moe")
_BLOCKS = {"M": Layer("mamba", None), "*": Layer("attention", None), "-": Layer(None, "mlp"), "E": Layer(None, "moe")}


@lru_cache(maxsize=1024)
def decoder_layers(arch: Architecture) -> tuple[Layer, ...]:
    """Return the kind of every decoder layer; BadInput if the memory of one is not modelled."""
    is_linear, is_sparse = arch.linear_attention_freq is not None, arch.experimental_attention_variant == "dsa"
    if is_linear or is_sparse:
        what = "linear-attention layers" if is_linear else "sparse attention (dsa)"
        raise BadInput(f"recipe {arch.recipe}: memory of {what} is not modelled; choose another recipe")
    if arch.hybrid_layer_pattern is not None:
        return _blocks(arch, arch.hybrid_layer_pattern.split("/")[0])
    return tuple(_EXPERTS if is_moe else _DENSE for is_moe in moe_layer_pattern(arch))


@lru_cache(maxsize=1024)
def prediction_layers(arch: Architecture) -> tuple[tuple[Layer, ...], ...]:
    """Return the layers of every multi-token-prediction module: of the last decoder layer's kind, or the pattern's."""
    if arch.hybrid_layer_pattern is None:
        return (decoder_layers(arch)[-1:],) * arch.mtp_num_layers
    given = [_blocks(arch, part) for part in arch.hybrid_layer_pattern.split("/")[1:]]
    return tuple(given or [decoder_layers(arch)[-1:]] * arch.mtp_num_layers)[: arch.mtp_num_layers]


def _blocks(arch: Architecture, pattern: str) -> tuple[Layer, ...]:
    symbols = pattern.replace("|", "")
    if unknown := set(symbols) - _BLOCKS.keys():
        what = f"memory of hybrid block {min(unknown)!r}"
        raise BadInput(f"recipe {arch.recipe}: {what} is not modelled; use M, *, - and E")
    return tuple(_BLOCKS[symbol] for symbol in symbols)


@lru_cache(maxsize=4096)
def pipeline_chunks(arch: Architecture, pp: int, vp: int, text: str | None) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every pipeline rank, virtual stage 0 first; BadInput if the layers cannot be split so.

    text: an explicit layout.
    """
    stages = _explicit(arch, pp, vp, text) if text else _even(arch, pp, vp)
    layers, position = decoder_layers(arch), 0
    chunks: list[Chunk] = []
    for index, (count, has_mtp, has_output) in enumerate(stages):
        own = layers[position : position + count]
        position += count
        prediction = prediction_layers(arch) if has_mtp else ()
        has_end = count > 0 and position == arch.num_layers if arch.mtp_num_layers else has_output
        chunks.append(_chunk(own, prediction, index == 0, has_end, has_output))
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


_chunk = lru_cache(maxsize=65536)(Chunk)


def chunks_of(arch: Architecture, layout: ParallelLayout) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every pipeline rank of this layout."""
    return pipeline_chunks(arch, layout.pp, layout.vp, layout.pipeline_layout if layout.pp > 1 else None)


def _explicit(arch: Architecture, pp: int, vp: int, text: str) -> list[tuple[int, bool, bool]]:
    if fault := layout_fault(text, pp, vp if vp > 1 else None, arch.num_layers, arch.mtp_num_layers):
        raise BadInput(f"pipeline_model_parallel_layout: {fault}; correct the layout {text!r}")
    return [(stage.count("t"), "m" in stage, "L" in stage) for stage in parse_layout(text)]


def _even(arch: Architecture, pp: int, vp: int) -> list[tuple[int, bool, bool]]:
    if pp == 1:  # Megatron-Core ignores virtual stages without a pipeline
        return [(arch.num_layers, bool(arch.mtp_num_layers), True)]
    counts = []
    for rank in range(pp):
        places = _per_rank(arch, pp, rank)
        if places % vp:
            raise BadInput(f"vp: {places} layers per pipeline stage are not divisible by vp = {vp}; use a divisor")
        counts.append(places // vp)
    counts *= vp
    counts[0] -= arch.account_for_embedding_in_pipeline_split
    counts[-1] -= arch.account_for_loss_in_pipeline_split
    if min(counts) < 0 or sum(counts) != arch.num_layers:
        raise BadInput(f"pp: {arch.num_layers} layers cannot be split into {pp} stages of {vp} as {counts}")
    last = len(counts) - 1
    return [(count, i == last and bool(arch.mtp_num_layers), i == last) for i, count in enumerate(counts)]


def _per_rank(arch: Architecture, pp: int, rank: int) -> int:
    """Return the places of one rank; the embedding and the loss, if counted, take one each."""
    first, last = arch.num_layers_in_first_pipeline_stage, arch.num_layers_in_last_pipeline_stage
    if rank == 0 and first is not None:
        return first
    if rank == pp - 1 and last is not None:
        return last
    ranks = pp - (first is not None) - (last is not None)
    layers = arch.num_layers - (first or 0) - (last or 0)
    layers += arch.account_for_embedding_in_pipeline_split + arch.account_for_loss_in_pipeline_split
    if layers % ranks:
        what = f"{layers} layers are not divisible by {ranks} pipeline stages"
        raise BadInput(f"pp: {what}; use a divisor, or pipeline_model_parallel_layout")
    return layers // ranks
