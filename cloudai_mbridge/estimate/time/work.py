"""A model as sublayers and matmuls, and the work of one rank for a token and for a micro-batch.

Multiply-adds are as in `training.flops` without its terms for norms; real sizes throughout (the formula for hybrid
models takes 2*hidden for the inner size of Mamba; here it is heads * head_dim). Sums are over the layers of the whole
model: only the tensor and expert sizes matter here, so few of them serve a whole sweep. FLOPs are of training: forward,
and twice that backward.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.linears import Linear, ParameterSplit, linears
from cloudai_mbridge.training.flops.attention import GATED_DELTA_NET
from cloudai_mbridge.training.flops.quantities import (
    count_layers,
    has_window,
    linear_attention_pattern,
    window_of,
    with_prediction,
)
from cloudai_mbridge.training.flops.total import parse_pattern


class Kind(StrEnum):
    """Kind of a sublayer."""

    ATTENTION = "attention"
    WINDOWED = "windowed"
    COMPRESSED = "compressed"
    LINEAR = "linear"
    MAMBA = "mamba"
    DENSE = "dense"
    MOE = "moe"


_WHOLE = ParameterSplit()
# A kind, and of compressed attention the ratio
Sublayer = tuple[Kind, int]


def sublayers(model: Architecture) -> Counter[Sublayer]:
    """Return the number of sublayers of each kind, including multi-token prediction."""
    if model.hybrid_layer_pattern is not None:
        decoder, prediction = parse_pattern(model.hybrid_layer_pattern)
        return Counter((_KINDS[symbol], 0) for symbol in "".join([decoder, *prediction]))
    dense, moe = count_layers(model)
    kinds = _mixers(model)
    kinds.update({(Kind.DENSE, 0): dense, (Kind.MOE, 0): moe})
    return +kinds


_KINDS = {"M": Kind.MAMBA, "*": Kind.ATTENTION, "-": Kind.DENSE, "E": Kind.MOE, "G": Kind.LINEAR}


def _mixers(model: Architecture) -> Counter[Sublayer]:
    """Return the mixers of a transformer. Top-k sparse attention (dsa) counts as full latent attention."""
    layers = model.num_layers + model.mtp_num_layers
    if model.experimental_attention_variant == "dsv4_hybrid":
        return Counter((Kind.COMPRESSED, ratio) for ratio in model.csa_compress_ratios or ())
    if model.experimental_attention_variant in GATED_DELTA_NET:
        linear = with_prediction(linear_attention_pattern(model), model.mtp_num_layers)
        return +Counter({(Kind.LINEAR, 0): linear, (Kind.ATTENTION, 0): layers - linear})
    windowed = 0
    if window_of(model) is not None and not model.multi_latent_attention:
        windowed = sum(has_window(model, number) for number in range(1, layers + 1))
    return +Counter({(Kind.WINDOWED, 0): windowed, (Kind.ATTENTION, 0): layers - windowed})


def mixer_matmuls(model: Architecture, sublayer: Sublayer) -> Sequence[Linear]:
    """Return the projections of an attention, linear-attention or Mamba sublayer."""
    h, (kind, ratio) = model.hidden_size, sublayer
    if kind is Kind.LINEAR:
        keys, values = _linear_widths(model)
        wide = 2 * keys + 2 * values + 2 * model.linear_num_value_heads
        return [Linear("in_proj", h, wide), Linear("out_proj", values, h, is_row=True)]
    if kind is Kind.COMPRESSED:
        return _compressed_matmuls(model, ratio)
    return linears(model, _WHOLE, "mamba" if kind is Kind.MAMBA else "attention")


def _compressed_matmuls(model: Architecture, ratio: int) -> list[Linear]:
    h, heads, value = model.hidden_size, model.num_attention_heads, model.v_head_dim
    rank, latent = model.q_lora_rank or h, model.o_lora_rank
    matmuls = [
        Linear("q_down", h, rank),
        Linear("q_up", rank, heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)),
        Linear("kv", h, value),
        Linear("o_down", heads * value // model.o_groups, latent, is_row=True, times=model.o_groups),
        Linear("o_up", latent * model.o_groups, h, is_row=True),
    ]
    if ratio == 4:
        index_heads, dim = model.dsa_indexer_n_heads or 0, model.dsa_indexer_head_dim or 0
        matmuls += [Linear("compressor", h, 4 * value), Linear("indexer", h, 4 * dim + index_heads)]
        matmuls.append(Linear("indexer_q", rank, index_heads * dim))
    elif ratio > 4:
        matmuls.append(Linear("compressor", h, 2 * value))
    return matmuls


def _linear_widths(model: Architecture) -> tuple[int, int]:
    keys = model.linear_key_head_dim * model.linear_num_key_heads
    return keys, model.linear_value_head_dim * model.linear_num_value_heads


def mixer_core(model: Architecture, sublayer: Sublayer) -> tuple[float, float]:
    """Return the multiply-adds of a mixer per token without its projections, and the exponentials of its softmax.

    They are of sequences of `seq_length`.
    """
    kind, ratio = sublayer
    if kind is Kind.MAMBA:
        # half of the formula's 7 * inner * state FLOPs are multiply-adds
        return 3.5 * (model.mamba_num_heads or 0) * model.mamba_head_dim * model.mamba_state_dim, 0
    if kind is Kind.LINEAR:
        keys, values = _linear_widths(model)
        state = 4 * values * model.linear_value_head_dim
        return model.linear_conv_kernel_dim * (2 * keys + values) + state, 0
    if kind is Kind.COMPRESSED:
        return _compressed_core(model, ratio)
    heads, s = model.num_attention_heads, model.seq_length
    window = window_of(model) or s
    context = s / 2  # keys that a query sees on average
    if kind is Kind.WINDOWED and window < s:
        context = window - window * (window - 1) / (2 * s)
    latent = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    dims = latent if model.multi_latent_attention else 2 * model.kv_channels
    return heads * dims * context, heads * context


def _compressed_core(model: Architecture, ratio: int) -> tuple[float, float]:
    heads, value, s = model.num_attention_heads, model.v_head_dim, model.seq_length
    keys: float = model.csa_window_size
    index = 0.0
    if ratio == 4:
        chosen = min(model.dsa_indexer_topk or 0, s // 4)
        keys += chosen * (1 - 4 * chosen / (2 * s))
        index = s * (model.dsa_indexer_n_heads or 0) * (model.dsa_indexer_head_dim or 0) / 4
    elif ratio > 4:
        index = s * heads * value / ratio
    return 2 * heads * value * keys + index, heads * keys


def dense_matmuls(model: Architecture) -> Sequence[Linear]:
    """Return the two matmuls of a feed-forward block."""
    return linears(model, _WHOLE, "mlp")


def moe_matmuls(model: Architecture) -> tuple[list[Linear], list[Linear]]:
    """Return the routed experts of a MoE sublayer, and every token's matmuls: shared expert and latent projections."""
    layers = [layer for layer in linears(model, _WHOLE, "moe") if layer.name != "router"]
    experts = [layer._replace(times=model.moe_router_topk) for layer in layers if layer.experts]
    return experts, [layer for layer in layers if not layer.experts]


def output_matmuls(model: Architecture) -> list[Linear]:
    """Return the output layer (once more per prediction layer) and the projections of multi-token prediction."""
    h, mtp = model.hidden_size, model.mtp_num_layers
    logits = Linear("output_layer", h, model.padded_vocab_size, times=1 + mtp)
    return [logits, Linear("eh_proj", 2 * h, h, times=mtp)] if mtp else [logits]


# Elements that a matmul's inputs and outputs pass through memory: read, written, and read again by both of backward
_PASSES = 3
_BF16 = 2  # bytes
# Of a weight: read forward and backward in 16 bit; its gradient is read and written in 32 bit
_WEIGHT_BYTES = 2 + 2 + 4 + 4


@dataclass
class Work:
    """Sums over the layers of one rank, were it alone in its pipeline.

    Of a token: FLOPs, exponentials, bytes. Of a micro-batch: weight bytes, and how many sublayers, collectives and
    experts there are. hidden, activation, routed and scan bytes: one pass of these tensors through memory. sparse:
    compressed attention. scan: state-space and linear attention.
    """

    attention_flops: float = 0
    mlp_flops: float = 0
    expert_flops: float = 0
    output_flops: float = 0
    core_flops: float = 0
    exponentials: float = 0
    matmul_bytes: float = 0
    expert_bytes: float = 0
    output_bytes: float = 0
    hidden_bytes: float = 0
    routed_bytes: float = 0
    activation_bytes: float = 0
    sparse_flops: float = 0
    scan_bytes: float = 0
    weight_bytes: float = 0
    output_weight_bytes: float = 0
    num_sublayers: float = 0
    num_moe: float = 0
    num_local_experts: float = 0
    num_collectives: float = 0
    key_value_bytes: float = 0
    dense_parameters: float = 0
    expert_parameters: float = 0


def work_of(model: Architecture, tp: int, ep: int, etp: int) -> Work:
    """Return the work of a rank among `tp` tensor, `ep` expert and `etp` expert-tensor ranks."""
    work = Work()
    for sublayer, count in sublayers(model).items():
        work.num_sublayers += count
        if sublayer[0] is Kind.MOE:
            _add_moe(work, model, count, tp, ep, etp)
        elif sublayer[0] is Kind.DENSE:
            _add_mlp(work, dense_matmuls(model), count, tp)
            work.activation_bytes += count * dense_matmuls(model)[0].outputs * _BF16 / tp
        else:
            _add_mixer(work, model, sublayer, count, tp)
    work.hidden_bytes += work.num_sublayers * model.hidden_size * _BF16 / tp
    output = output_matmuls(model)
    work.output_flops = _flops(output) / tp
    work.output_bytes = _bytes(output, tp)
    work.output_weight_bytes = _WEIGHT_BYTES * sum(m.multiply_adds for m in output) / tp
    tables = 1 if model.share_embeddings_and_output_weights else 2
    work.dense_parameters += tables * model.hidden_size * model.padded_vocab_size / tp
    return work


def _add_mixer(work: Work, model: Architecture, sublayer: Sublayer, count: int, tp: int) -> None:
    matmuls = mixer_matmuls(model, sublayer)
    work.attention_flops += count * _flops(matmuls) / tp
    _add_matmul_bytes(work, matmuls, count, tp)
    work.num_collectives += count
    if sublayer[0] in (Kind.MAMBA, Kind.LINEAR):
        work.scan_bytes += count * _BF16 * sum(m.outputs for m in matmuls if not m.is_row) / tp
        return
    multiply_adds, exponentials = mixer_core(model, sublayer)
    work.key_value_bytes += count * _BF16 * 2 * model.kv_channels * max(1, model.num_query_groups / tp)
    if sublayer[0] is Kind.COMPRESSED:
        work.sparse_flops += count * 6 * multiply_adds / tp
        return
    work.core_flops += count * 6 * multiply_adds / tp
    work.exponentials += count * 2 * exponentials / tp


def _add_mlp(work: Work, matmuls: Sequence[Linear], count: int, tp: int) -> None:
    work.mlp_flops += count * _flops(matmuls) / tp
    _add_matmul_bytes(work, matmuls, count, tp)
    work.num_collectives += count * bool(matmuls)


def _add_moe(work: Work, model: Architecture, count: int, tp: int, ep: int, etp: int) -> None:
    experts, shared = moe_matmuls(model)
    work.num_moe += count
    work.num_local_experts += count * max(1.0, (model.num_moe_experts or 1) / ep)
    work.expert_flops += count * _flops(experts) / tp
    work.expert_bytes += count * _bytes(experts, etp) * etp / tp
    parameters = count * sum(m.inputs * m.outputs * m.experts for m in experts) / (ep * etp)
    work.weight_bytes += parameters * _WEIGHT_BYTES
    work.expert_parameters += parameters
    width = model.moe_latent_size or model.hidden_size
    work.routed_bytes += count * model.moe_router_topk * width * _BF16 / tp
    work.activation_bytes += count * model.moe_router_topk * experts[0].outputs * _BF16 / tp
    _add_mlp(work, shared, count, tp)


def _add_matmul_bytes(work: Work, matmuls: Sequence[Linear], count: int, tp: int) -> None:
    parameters = count * sum(m.multiply_adds for m in matmuls) / tp
    work.matmul_bytes += count * _bytes(matmuls, tp)
    work.weight_bytes += parameters * _WEIGHT_BYTES
    work.dense_parameters += parameters


def _flops(matmuls: Iterable[Linear]) -> float:
    return 6 * sum(m.multiply_adds for m in matmuls)


def _bytes(matmuls: Iterable[Linear], ranks: int) -> float:
    """Return the bytes of one token's inputs and outputs; ranks split the output, or a row-parallel matmul's input."""
    sides = ((m.inputs / ranks + m.outputs if m.is_row else m.inputs + m.outputs / ranks) * m.times for m in matmuls)
    return _PASSES * _BF16 * sum(sides)
