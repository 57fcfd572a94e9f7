"""Weights, gradients and optimizer state of a stage, in bytes.

Adam with 32-bit master weights: 12 bytes per parameter, 8 if the weights are 32 bits themselves, less with 16-bit
moments. The distributed optimizer splits them over data- and context-parallel ranks, of experts over the expert
data-parallel ranks. Not counted: its 32-bit copy of 16-bit gradients during the step, when activations are gone.
Megatron-FSDP splits weights and gradients too, and gathers a layer while it is computed. With several instances they
are split over the ranks of one, and so is the optimizer, unless it is sharded between them, too. Source: Megatron-Core
0.16, `optimizer`, `distributed`, of 0.19 `ParamAndGradBuffer`, and the quantized tensors of Transformer Engine 2.x.
"""

from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import RankParameters
from cloudai_mbridge.estimate.memory.sizes import QUANTIZED
from cloudai_mbridge.estimate.precision import Precision

_PER_TENSOR = (Precision.FP8_CS, Precision.FP8_DS, Precision.FP8_SC)


def states(
    parameters: RankParameters, layout: ParallelLayout, unsharded: int, adapters: RankParameters
) -> dict[str, float]:
    """Return the bytes of every term. unsharded: parameters that Megatron-FSDP holds whole while they are used.

    adapters: trained with frozen weights, in 16 or 32 bits.
    """
    shards, expert_shards = _shards(layout) if layout.use_megatron_fsdp else (1, 1)
    dense, experts = parameters.dense / shards, parameters.experts / expert_shards
    quantized = parameters.quantized_dense / shards + experts
    weight, copies, gradient = bytes_per_weight(layout)
    added = adapters.dense / shards + adapters.experts / expert_shards
    is_frozen = layout.adapters is not None
    kept_in_16_bits = dense + experts - quantized + added
    return {
        "weights": quantized * weight + kept_in_16_bits * _plain(layout),
        "quantized copies": quantized * copies,
        "gradients": (added if is_frozen else dense + experts) * gradient,
        "optimizer": _optimizer(adapters if is_frozen else parameters, layout),
        "fsdp buffers": unsharded * (weight + copies + (0 if is_frozen else gradient)),
    }


def bytes_per_weight(layout: ParallelLayout) -> tuple[float, float, float]:
    """Return bytes per weight of a matrix product: the weight itself, its quantized copies, its gradient."""
    gradient = 4.0 if layout.grad_reduce_in_fp32 or layout.precision.is_32_bit else 2.0
    copy = QUANTIZED.get(layout.precision, 0.0)
    copies = 1 if layout.precision in _PER_TENSOR and not layout.has_fp8_transposes else 2  # row- and column-wise
    if not copy or not layout.fp8_param_gather or layout.precision is Precision.NVFP4:
        return _plain(layout), copies * copy, gradient
    return copy, (copies - 1) * copy, gradient  # the quantized weight is the weight


def _shards(layout: ParallelLayout) -> tuple[int, int]:
    """Return the numbers of ranks of an instance that split the dense layers' share, and the experts'."""
    instances = layout.num_distributed_optimizer_instances
    return layout.dp * layout.cp // instances, layout.expert_dp // instances


def _plain(layout: ParallelLayout) -> float:
    return float(layout.precision.activation_bytes)


def _optimizer(parameters: RankParameters, layout: ParallelLayout) -> float:
    per_weight = 8 if layout.precision.is_32_bit else layout.optimizer_bytes
    on_device = 1 - layout.optimizer_offload_fraction
    if not (layout.use_distributed_optimizer or layout.use_megatron_fsdp):
        return parameters.total * per_weight * on_device
    between = layout.use_megatron_fsdp and layout.outer_dp_sharding_strategy != "no_shard"
    shards, expert_shards = (layout.dp * layout.cp, layout.expert_dp) if between else _shards(layout)
    shard = parameters.dense / shards + parameters.experts / expert_shards
    return shard * per_weight * on_device
