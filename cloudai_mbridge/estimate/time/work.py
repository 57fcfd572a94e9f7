"""The work of one rank for a token and for a micro-batch, summed over the layers of the whole model.

Only the tensor and expert sizes matter here, so few of these sums serve a whole sweep. FLOPs are of training: forward,
and twice that backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.time import blocks
from cloudai_mbridge.estimate.time.blocks import Kind, Matmul, Sublayer

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
    for sublayer, count in blocks.sublayers(model).items():
        work.num_sublayers += count
        if sublayer[0] is Kind.MOE:
            _add_moe(work, model, count, tp, ep, etp)
        elif sublayer[0] is Kind.DENSE:
            _add_mlp(work, blocks.dense_matmuls(model), count, tp)
            work.activation_bytes += count * blocks.dense_matmuls(model)[0].n * _BF16 / tp
        else:
            _add_mixer(work, model, sublayer, count, tp)
    work.hidden_bytes += work.num_sublayers * model.hidden_size * _BF16 / tp
    output = blocks.output_matmuls(model)
    work.output_flops = _flops(output) / tp
    work.output_bytes = _bytes(output, tp)
    work.output_weight_bytes = _WEIGHT_BYTES * sum(m.k * m.n * m.times for m in output) / tp
    tables = 1 if model.share_embeddings_and_output_weights else 2
    work.dense_parameters += tables * model.hidden_size * model.padded_vocab_size / tp
    return work


def _add_mixer(work: Work, model: Architecture, sublayer: Sublayer, count: int, tp: int) -> None:
    matmuls = blocks.mixer_matmuls(model, sublayer)
    work.attention_flops += count * _flops(matmuls) / tp
    _add_matmul_bytes(work, matmuls, count, tp)
    work.num_collectives += count
    if sublayer[0] in (Kind.MAMBA, Kind.LINEAR):
        work.scan_bytes += count * _BF16 * sum(m.n for m in matmuls if not m.is_row) / tp
        return
    core = blocks.mixer_core(model, sublayer)
    work.key_value_bytes += count * _BF16 * 2 * model.kv_channels * max(1, model.num_query_groups / tp)
    if sublayer[0] is Kind.COMPRESSED:
        work.sparse_flops += count * 6 * core.multiply_adds / tp
        return
    work.core_flops += count * 6 * core.multiply_adds / tp
    work.exponentials += count * 2 * core.exponentials / tp


def _add_mlp(work: Work, matmuls: list[Matmul], count: int, tp: int) -> None:
    work.mlp_flops += count * _flops(matmuls) / tp
    _add_matmul_bytes(work, matmuls, count, tp)
    work.num_collectives += count * bool(matmuls)


def _add_moe(work: Work, model: Architecture, count: int, tp: int, ep: int, etp: int) -> None:
    experts = blocks.expert_matmuls(model)
    work.num_moe += count
    work.num_local_experts += count * max(1.0, (model.num_moe_experts or 1) / ep)
    work.expert_flops += count * _flops(experts) / tp
    work.expert_bytes += count * _bytes(experts, etp) * etp / tp
    parameters = count * sum(m.k * m.n * m.copies for m in experts) / (ep * etp)
    work.weight_bytes += parameters * _WEIGHT_BYTES
    work.expert_parameters += parameters
    width = model.moe_latent_size or model.hidden_size
    work.routed_bytes += count * model.moe_router_topk * width * _BF16 / tp
    work.activation_bytes += count * model.moe_router_topk * experts[0].n * _BF16 / tp
    _add_mlp(work, blocks.shared_matmuls(model), count, tp)


def _add_matmul_bytes(work: Work, matmuls: list[Matmul], count: int, tp: int) -> None:
    parameters = count * sum(m.multiply_adds for m in matmuls) / tp
    work.matmul_bytes += count * _bytes(matmuls, tp)
    work.weight_bytes += parameters * _WEIGHT_BYTES
    work.dense_parameters += parameters


def _flops(matmuls: Iterable[Matmul]) -> float:
    return 6 * sum(m.multiply_adds for m in matmuls)


def _bytes(matmuls: Iterable[Matmul], ranks: int) -> float:
    """Return the bytes of one token's inputs and outputs; ranks split the output, or a row-parallel matmul's input."""
    sides = ((m.k / ranks + m.n if m.is_row else m.k + m.n / ranks) * m.times for m in matmuls)
    return _PASSES * _BF16 * sum(sides)
