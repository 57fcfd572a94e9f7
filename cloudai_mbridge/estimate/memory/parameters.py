"""The layers of every pipeline stage, and the parameters of every rank, as in the model that Megatron-Core 0.16 builds.

All tensor-, context- and data-parallel ranks of a stage hold equally many. Transformer Engine changes one count: it
repeats the down projections of multi-latent attention on every tensor-parallel rank, while Megatron's own linear layers
split them. Source: `transformer_block.get_num_layers_to_build`, `pipeline_parallel_layer_layout`,
`mamba_hybrid_layer_allocation`; `megatron/core/transformer` (attention, multi_latent_attention, mlp, moe,
multi_token_prediction), `models/gpt/gpt_model`, `ssm/mamba_mixer`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal

from cloudai_mbridge.errors import BadInput, NotModelled
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.memory.linears import Linear, ParameterSplit, linears, split_of
from cloudai_mbridge.models.pipeline_layout import SplitFault, layout_fault, parse_layout, split_layers
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
        raise NotModelled(f"recipe {arch.recipe}: memory of {what} is not modelled; choose another recipe")
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
        raise NotModelled(f"recipe {arch.recipe}: {what} is not modelled; use M, *, - and E")
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
        chunks.append(_same_chunk(own, prediction, index == 0, has_end, has_output))
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


_same_chunk = lru_cache(maxsize=65536)(Chunk)


def chunks_of(arch: Architecture, layout: ParallelLayout) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every pipeline rank of this layout."""
    return pipeline_chunks(arch, layout.pp, layout.vp, layout.pipeline_layout if layout.pp > 1 else None)


def _explicit(arch: Architecture, pp: int, vp: int, text: str) -> list[tuple[int, bool, bool]]:
    if fault := layout_fault(text, pp, vp if vp > 1 else None, arch.num_layers, arch.mtp_num_layers):
        raise BadInput(f"pipeline_model_parallel_layout: {fault}; correct the layout {text!r}")
    return [(stage.count("t"), "m" in stage, "L" in stage) for stage in parse_layout(text)]


def _even(arch: Architecture, pp: int, vp: int) -> list[tuple[int, bool, bool]]:
    try:
        counts = split_layers(
            arch.num_layers,
            pp,
            vp,
            first=arch.num_layers_in_first_pipeline_stage,
            last=arch.num_layers_in_last_pipeline_stage,
            embedding=arch.account_for_embedding_in_pipeline_split,
            loss=arch.account_for_loss_in_pipeline_split,
        )
    except SplitFault as fault:
        raise BadInput(str(fault)) from None
    end = len(counts) - 1
    return [(count, i == end and bool(arch.mtp_num_layers), i == end) for i, count in enumerate(counts)]


EXPERTS, ADAPTERS = "experts", "adapters"
# not quantized: norms, embedding, router and output stay in 16 bits under FP8 and FP4
IN_16_BITS = ("embedding", "norms", "router", "output_layer", "mamba_kernels", "other", ADAPTERS)


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank. by_module: name -> number of parameters."""

    by_module: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.by_module.values())

    @property
    def experts(self) -> int:
        """Parameters sharded over the expert-parallel group, and reduced over the expert data-parallel group."""
        return self.by_module.get(EXPERTS, 0)

    @property
    def dense(self) -> int:
        """All other parameters."""
        return self.total - self.experts

    @property
    def quantized_dense(self) -> int:
        """Weights of the dense matrix products that run in 8 or 4 bits if the precision requests it."""
        return self.dense - sum(self.by_module.get(name, 0) for name in IN_16_BITS)


def parameters_per_stage(arch: Architecture, layout: ParallelLayout) -> tuple[RankParameters, ...]:
    """Return the parameters on a rank of every pipeline stage."""
    arch, split = padded_for(arch, layout.tp), split_of(layout)
    return tuple(_stage(arch, split, chunks) for chunks in chunks_of(arch, layout))


def layer_parameters(arch: Architecture, layout: ParallelLayout, layer: Layer) -> int:
    """Return the parameters of one layer on a rank."""
    return sum(_layer(arch, split_of(layout), layer).values())


def total_parameters(arch: Architecture) -> int:
    """Return the parameters of the whole model, once."""
    return _whole(arch).total


def active_parameters(arch: Architecture) -> int:
    """Return the parameters active for a token: of the experts only `moe_router_topk`."""
    parameters = _whole(arch)
    idle = parameters.experts * (1 - arch.moe_router_topk / arch.num_moe_experts) if arch.num_moe_experts else 0
    return parameters.total - round(idle)


def _whole(arch: Architecture) -> RankParameters:
    return _stage(padded_for(arch, 1), ParameterSplit(), pipeline_chunks(arch, 1, 1, None)[0])


@lru_cache(maxsize=1024)
def padded_for(arch: Architecture, tp: int) -> Architecture:
    """Return the architecture with the vocabulary padded for this tensor-parallel size."""
    return arch if arch.tensor_model_parallel_size == tp else replace(arch, tensor_model_parallel_size=tp)


@lru_cache(maxsize=4096)
def _stage(arch: Architecture, split: ParameterSplit, chunks: tuple[Chunk, ...]) -> RankParameters:
    counts: Counter[str] = Counter()
    for chunk in chunks:
        counts.update(_chunk(arch, split, chunk))
    return RankParameters(MappingProxyType(dict(counts)))


@lru_cache(maxsize=4096)
def _chunk(arch: Architecture, split: ParameterSplit, chunk: Chunk) -> Mapping[str, int]:
    h, counts = arch.hidden_size, Counter[str]()
    vocabulary = arch.padded_vocab_size // split.tp * h
    if chunk.has_embedding or chunk.mtp:
        counts["embedding"] += vocabulary
        if arch.position_embedding_type == "learned_absolute":
            counts["embedding"] += arch.seq_length * h
    if chunk.has_output and not (arch.share_embeddings_and_output_weights and chunk.has_embedding):
        counts["output_layer"] += vocabulary
    counts["norms"] += chunk.has_decoder_end * norm(arch, h)
    for layer in chunk.layers:
        counts.update(_layer(arch, split, layer))
    for module in chunk.mtp[: 1 if arch.mtp_use_repeated_layer else None]:
        counts["norms"] += 3 * norm(arch, h)
        counts["mtp_projection"] += 2 * h * h // split.tp
        for layer in module:
            counts.update(_layer(arch, split, layer))
    return counts


@lru_cache(maxsize=4096)
def _layer(arch: Architecture, split: ParameterSplit, layer: Layer) -> Mapping[str, int]:
    halves = [half for half in (layer.mixer, layer.ffn) if half]
    counts = Counter(norms=len(halves) * norm(arch, arch.hidden_size))
    for half in halves:
        counts.update(_HALVES[half](arch, split))
    return counts


def norm(arch: Architecture, width: int) -> int:
    """RMSNorm has no bias."""
    return width if arch.normalization == "RMSNorm" else 2 * width


def mlp(arch: Architecture, ffn: int, tp: int, *, width: int | None = None, has_bias: bool | None = None) -> int:
    """Return the parameters of a two- or (gated) three-matrix MLP on one rank; the second bias is not split."""
    width = arch.hidden_size if width is None else width
    up = (2 if arch.gated_linear_unit else 1) * ffn
    bias = arch.add_bias_linear if has_bias is None else has_bias
    return (width * up + width * ffn) // tp + (up // tp + width if bias else 0)


def _attention(arch: Architecture, split: ParameterSplit) -> dict[str, int]:
    if arch.experimental_attention_variant == "dsv4_hybrid":
        return {"attention": _dsv4_attention(arch, split.tp)}
    layers = linears(arch, split, "attention")
    count = _weights(layers) + (arch.hidden_size if arch.add_bias_linear else 0)
    if arch.multi_latent_attention:
        ranks = [rank for rank in (arch.kv_lora_rank, arch.q_lora_rank) if rank is not None]
        return {"attention": count, "norms": sum(norm(arch, rank) for rank in ranks) if arch.qk_layernorm else 0}
    count += layers[0].outputs // split.tp if arch.add_bias_linear or arch.add_qkv_bias else 0
    norms = 2 * norm(arch, arch.kv_channels) if arch.qk_layernorm else 0
    sinks = arch.num_attention_heads // split.tp if arch.softmax_type == "learnable" else 0
    return {"attention": count, "norms": norms, "other": sinks}


def _weights(layers: Iterable[Linear]) -> int:
    return sum(layer.inputs * layer.outputs // layer.ranks for layer in layers)


def _moe(arch: Architecture, split: ParameterSplit) -> dict[str, int]:
    h, experts, latent = arch.hidden_size, arch.num_moe_experts or 0, arch.moe_latent_size
    ffn = arch.moe_ffn_hidden_size or arch.ffn_hidden_size
    shared = arch.moe_shared_expert_intermediate_size
    counts = {
        "router": experts * h + (experts if arch.add_bias_linear else 0),
        EXPERTS: experts // split.ep * mlp(arch, ffn, split.etp, width=latent),
    }
    if latent:  # built by Transformer Engine alone, and not split
        counts["latent_projections"] = 2 * h * latent + (latent + h if arch.add_bias_linear else 0)
    if shared is not None:
        counts["shared_experts"] = mlp(arch, shared, split.tp, has_bias=False)
        counts["other"] = h if arch.moe_shared_expert_gate else 0
    return counts


def _mamba(arch: Architecture, split: ParameterSplit) -> dict[str, int]:
    """A Mamba-2 mixer: input projection, convolution over 4 tokens with bias, A, D, dt bias, gated norm, output."""
    heads = arch.mamba_num_heads or 2 * arch.hidden_size // arch.mamba_head_dim
    inner, states = heads * arch.mamba_head_dim, 2 * arch.mamba_num_groups * arch.mamba_state_dim
    kernels = (5 * (inner + states) + 3 * heads + inner) // split.tp
    return {"mamba": _weights(linears(arch, split, "mamba")), "mamba_kernels": kernels}


_HALVES: Mapping[str, Callable[[Architecture, ParameterSplit], Mapping[str, int]]] = {
    "attention": _attention,
    "mamba": _mamba,
    "mlp": lambda arch, split: {"mlp": mlp(arch, arch.ffn_hidden_size, split.tp)},
    "moe": _moe,
}


def _dsv4_attention(arch: Architecture, tp: int) -> int:
    """Return the parameters of one layer on one rank, averaged over the layers. Weights on latents are not split."""
    h, a, d_v = arch.hidden_size, arch.num_attention_heads // tp, arch.v_head_dim
    r_q, r_o = arch.q_lora_rank or h, arch.o_lora_rank
    query = r_q * (h + a * (arch.qk_head_dim + arch.qk_pos_emb_head_dim) + 1)
    output = a * d_v * r_o + arch.o_groups * r_o * h
    heads, dim, ratios = arch.dsa_indexer_n_heads or 0, arch.dsa_indexer_head_dim or 0, arch.csa_compress_ratios or ()
    compressor = 2 * h * d_v
    indexer = 4 * h * dim + r_q * heads * dim + h * heads
    compressors = sum({4: 2 * compressor + indexer, 128: compressor}.get(ratio, 0) for ratio in ratios)
    return query + h * d_v + d_v + output + compressors // max(1, len(ratios))
