"""The parts of a step, each as its time on ideal hardware; coefficients turn it into the real time.

A part is work over a peak rate: FLOPs over the dense peak, bytes over memory or link bandwidth, or a count in
microseconds. Nothing overlaps here: the coefficients contain the overlap. Groups of parts have common errors on a
cluster.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import FACTORS, Gpu, Precision
from cloudai_mbridge.estimate.memory.layout import Granularity, ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import pipeline_chunks
from cloudai_mbridge.estimate.time.work import Work

_MICRO = 1e-6
# Gradients reduced and weights gathered, in 16 bit
_DP_BYTES = 2 + 2
# Sharded weights are gathered forward and backward and gradients reduced, for every micro-batch
_FSDP_BYTES = 2 + 2 + 2
# Of a weight: its 16-bit gradient copied to 32 bits, the norm, the clipping; the gradient, the 32-bit weight and two
# moments read, the last three written; the 16-bit weight written from its copy, and the gradient zeroed
_OPTIMIZER_BYTES = (2 + 4) + 4 + (4 + 4) + 4 + 2 * (4 + 4 + 4) + (4 + 2) + 2


class IdealTimes(NamedTuple):
    """Ideal seconds of a step on the slowest pipeline stage. The pipeline idles for a share of those before dp_comm.

    memory_*: operands and results of matmuls through memory. launches_*: a microsecond for every MoE sublayer, every
    expert on the rank, and every MoE sublayer whose experts are beyond the NVLink domain, in every micro-batch.
    """

    matmul_attention: float
    matmul_mlp: float
    matmul_experts: float
    matmul_output: float
    attention_core: float
    attention_exp: float
    sparse_core: float
    scan: float
    memory_matmul: float
    memory_experts: float
    memory_weights: float
    elementwise: float
    activation: float
    routing: float
    launches_moe: float
    launches_experts: float
    launches_network: float
    tp_comm: float
    cp_comm: float
    ep_nvlink: float
    ep_network: float
    pp_comm: float
    dp_comm: float
    fsdp_comm: float
    optimizer: float


NUM_PIPELINED = IdealTimes._fields.index("dp_comm")


class GpuRates(NamedTuple):
    """Rates of a GPU in a precision, per second."""

    peak: float
    peak_bf16: float
    memory: float
    exponentials: float
    gpu: Gpu


def device_of(gpu: Gpu, precision: Precision) -> GpuRates | None:
    """Return the rates, or None if the GPU has no figures for the precision."""
    peak, bf16 = gpu.peak(precision), gpu.peak(Precision.BF16)
    if peak is None or bf16 is None or gpu.memory_bandwidth_gb_s is None or gpu.exp_per_s is None:
        return None
    return GpuRates(peak * 1e12, min(peak, bf16) * 1e12, gpu.memory_bandwidth_gb_s * 1e9, gpu.exp_per_s * 1e12, gpu)


def bubble(pp: int, vp: int, num_microbatches: int) -> float:
    """Return the idle time of the 1F1B pipeline over the busy time: (pp - 1) / (vp * micro-batches).

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section 2.2.
    """
    return (pp - 1) / (vp * num_microbatches)


def ideal_parts(
    model: Architecture, work: Work, layout: ParallelLayout, device: GpuRates, num_microbatches: int
) -> IdealTimes:
    """Return the ideal times of a step."""
    tokens = num_microbatches * layout.mbs * (layout.seq_length or model.seq_length) / layout.cp
    stage, output = stage_shares(model, work, layout)
    layers = tokens * stage
    again = recomputed(model, layout)
    memory = device.memory
    weights = work.weight_bytes * stage + work.output_weight_bytes * output
    sublayers = stage * num_microbatches * _MICRO
    moe_sublayers = work.num_moe * sublayers * again.moe
    is_far = layout.ep * layout.expert_tp > device.gpu.nvlink_domain
    return IdealTimes(
        work.attention_flops * layers * again.attention / device.peak,
        work.mlp_flops * layers * again.mlp / device.peak,
        work.expert_flops * layers * again.moe / device.peak,
        work.output_flops * tokens * output / device.peak_bf16,
        work.core_flops * layers * again.core / device.peak_bf16,
        work.exponentials * layers * again.core / device.exponentials,
        work.sparse_flops * layers * again.core / device.peak_bf16,
        work.scan_bytes * layers * again.attention / memory,
        (work.matmul_bytes * layers + work.output_bytes * tokens * output) / memory,
        work.expert_bytes * layers * again.moe / memory,
        weights * num_microbatches / memory,
        work.hidden_bytes * layers * again.other / memory,
        work.activation_bytes * layers * again.mlp / memory,
        work.routed_bytes * layers * again.moe / memory,
        moe_sublayers,
        work.num_local_experts * sublayers * again.moe,
        moe_sublayers * is_far,
        *_pipelined_comm(model, work, layout, device.gpu, layers),
        *_per_step(work, layout, device, num_microbatches),
    )


def launch_time_s(work: Work, layout: ParallelLayout, num_microbatches: int) -> float:
    """Return the time in which the host launches all sublayers of a step at a microsecond each; 0 from a CUDA graph."""
    return 0.0 if layout.cuda_graph == "full" else work.num_sublayers / layout.pp * num_microbatches * _MICRO


def stage_shares(model: Architecture, work: Work, layout: ParallelLayout) -> tuple[float, float]:
    """Return the slowest stage's shares of the layers and of the output layer.

    It is the stage with the most FLOPs, every layer counted as average: of evenly divided layers the last stage,
    which also has the output. If Megatron-Core has no split, the stages count as balanced.
    """
    pp = layout.pp
    ends = model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage
    is_counted = model.account_for_embedding_in_pipeline_split or model.account_for_loss_in_pipeline_split
    is_even = ends == (None, None) and not is_counted and model.num_layers % pp == 0
    if pp == 1 or (layout.pipeline_layout is None and is_even):
        return 1 / pp, 1.0
    layers = work.attention_flops + work.mlp_flops + work.expert_flops + work.core_flops + work.sparse_flops
    stages = _stages(model, pp, layout.vp, layout.pipeline_layout)
    return max(stages, key=lambda stage: stage[0] * layers + stage[1] * work.output_flops)


@lru_cache(maxsize=1024)
def _stages(model: Architecture, pp: int, vp: int, text: str | None) -> tuple[tuple[float, float], ...]:
    """Return every stage's share of the layers, including multi-token prediction, and of the output."""
    try:
        ranks = pipeline_chunks(model, pp, vp, text)
    except BadInput:
        return ((1 / pp, 1 / pp),)
    counts = [sum(len(chunk.layers) + sum(map(len, chunk.mtp)) for chunk in chunks) for chunks in ranks]
    outputs = [float(any(chunk.has_output for chunk in chunks)) for chunks in ranks]
    return tuple((count / sum(counts), output) for count, output in zip(counts, outputs, strict=True))


def _pipelined_comm(
    model: Architecture, work: Work, layout: ParallelLayout, gpu: Gpu, layers: float
) -> tuple[float, float, float, float, float]:
    hidden = 2 * model.hidden_size
    tp, cp, pp = layout.tp, layout.cp, layout.pp
    tensor = context = nvlink = network = pipeline = 0.0
    if tp > 1:  # gathered and scattered around a sublayer, forward and backward, and gathered once more
        sent = 5 * work.num_collectives * hidden * layers * (tp - 1) / tp
        tensor = sent / (ring_gb_s(gpu, tp, 1) * 1e9)
    if cp > 1:  # keys and values go round, and with their gradients backward
        context = 3 * work.key_value_bytes * layers * (cp - 1) / (ring_gb_s(gpu, cp, tp) * 1e9)
    if layout.ep > 1 and work.num_moe:
        topk = model.moe_router_topk
        near, far = exchange_shares(gpu, layout.ep * layout.expert_tp, topk, is_once=layout.dispatches_once)
        moved = 4 * work.routed_bytes * layers / topk  # dispatched and combined, forward and backward
        nvlink = moved * near / ((gpu.nvlink_gb_s or 0.0) * 1e9)
        network = moved * far / ((gpu.nic_gb_s or 0.0) * 1e9) if far else 0.0
    if pp > 1:
        passes = 2 * layout.vp * hidden * layers * pp / tp
        pipeline = passes / (ring_gb_s(gpu, 2, tp * cp * layout.dp) * 1e9)
    return tensor, context, nvlink, network, pipeline


def _per_step(
    work: Work, layout: ParallelLayout, device: GpuRates, num_microbatches: int
) -> tuple[float, float, float]:
    gpu, pp = device.gpu, layout.pp
    replicas, expert_replicas = layout.dp * layout.cp, layout.expert_dp
    dense, experts = work.dense_parameters / pp, work.expert_parameters / pp
    dense_s = dense * (replicas - 1) / replicas / (ring_gb_s(gpu, replicas, layout.tp) * 1e9)
    stride = layout.ep * layout.expert_tp
    expert_s = experts * (expert_replicas - 1) / expert_replicas / (ring_gb_s(gpu, expert_replicas, stride) * 1e9)
    moved = dense_s + expert_s
    local = dense / replicas + experts / expert_replicas
    optimizer = local * _OPTIMIZER_BYTES / device.memory
    if layout.use_megatron_fsdp:
        return 0.0, moved * _FSDP_BYTES * num_microbatches, optimizer
    return moved * _DP_BYTES, 0.0, optimizer


def ring_gb_s(gpu: Gpu, ranks: int, stride: int) -> float:
    """Return the speed of a ring of `ranks`, `stride` apart, in 1e9 byte/s and direction, as seen by one rank.

    A ring within the NVLink domain runs at NVLink speed. A ring across domains runs at the speed of the network
    adapters of its ranks within one domain, as that many rings run in parallel; never faster than NVLink.
    """
    nvlink, nic = gpu.nvlink_gb_s or 0.0, gpu.nic_gb_s or 0.0
    if ranks * stride <= gpu.nvlink_domain:
        return nvlink
    together = max(1, gpu.nvlink_domain // stride)
    return min(nvlink, nic * together)


def exchange_shares(gpu: Gpu, ranks: int, copies: int, *, is_once: bool) -> tuple[float, float]:
    """Return how often a token crosses NVLink and how often the network, on its way to experts on `ranks` neighbours.

    is_once: a token goes to a rank once however many of its `copies` experts live there, and to another domain once;
    behind the network it is spread over NVLink. Else it goes to each of its experts. Experts are chosen evenly.
    """
    if not is_once:
        here = min(ranks, gpu.nvlink_domain)
        return copies * (here - 1) / ranks, copies * (ranks - here) / ranks
    near = _reached(ranks, copies) * (ranks - 1) / ranks
    if ranks <= gpu.nvlink_domain:
        return near, 0.0
    domains = ranks / gpu.nvlink_domain
    return near, _reached(domains, copies) * (domains - 1) / domains


def _reached(places: float, copies: int) -> float:
    """Return the mean number of `places` that hold one of `copies` experts."""
    return float(places * (1 - (1 - 1 / places) ** copies))


_FORWARD = 1 / 3


class RecomputeFactors(NamedTuple):
    """Work with recomputation over work without."""

    attention: float = 1
    core: float = 1
    mlp: float = 1
    moe: float = 1
    other: float = 1


def recomputed(model: Architecture, layout: ParallelLayout) -> RecomputeFactors:
    """Return the factors of a layout.

    Of modules that are part of a group of work (the up-projections of latent attention, an activation, a norm) the part
    is rough: half of the projections, a quarter of the element-wise passes.
    """
    recompute = layout.recompute
    if recompute.granularity is Granularity.NONE:
        return RecomputeFactors()
    if recompute.granularity is Granularity.FULL:  # all layers of a rank, or the first of every chunk
        share = recompute.num_layers * layout.pp * layout.vp / model.num_layers
        whole = 1 + _FORWARD * (1.0 if recompute.method == "uniform" else min(1.0, share))
        return RecomputeFactors(whole, whole, whole, whole, whole)
    modules = recompute.modules
    return RecomputeFactors(
        attention=1 + _FORWARD / 2 * ("mla_up_proj" in modules),
        core=1 + _FORWARD * ("core_attn" in modules),
        mlp=1 + _FORWARD * ("mlp" in modules or "shared_experts" in modules),
        moe=1 + _FORWARD * ("moe" in modules),
        other=1 + _FORWARD / 4 * (("layernorm" in modules) + ("moe_act" in modules)),
    )


# Launches by the host are a separate group: not a part, but the GPU may have to wait for them
_GROUPS = {
    "compute": (
        *(name for name in IdealTimes._fields if name.startswith("matmul")),
        *("attention_core", "attention_exp", "sparse_core"),
    ),
    "memory": ("memory_matmul", "memory_experts", "memory_weights", "elementwise", "activation", "routing", "scan"),
    "experts": ("launches_moe", "launches_experts", "launches_network", "ep_nvlink", "ep_network"),
    "links": ("tp_comm", "cp_comm", "pp_comm"),
    "data_parallel": ("dp_comm", "fsdp_comm"),
    "optimizer": ("optimizer",),
}
GROUP_OF = {part: group for group, parts in _GROUPS.items() for part in parts}
# Launches and work of similar length overlap badly: together they take their power mean of this exponent
SHARPNESS = 4.0


class StepGroups(NamedTuple):
    """Seconds of a step's parts in groups, of the host's launches, and the pipeline's idle share.

    The first four and the launches run at the same time, 1 + bubble times; then come the last two.
    """

    compute: float
    memory: float
    experts: float
    links: float
    launches: float
    data_parallel: float
    optimizer: float
    bubble: float


def grouped(parts: Iterable[float], launches: float, bubble: float) -> StepGroups:
    """Add up the seconds of `IdealTimes`, in their order."""
    sums = dict.fromkeys(FACTORS, 0.0)
    for name, seconds in zip(IdealTimes._fields, parts, strict=True):
        sums[GROUP_OF[name]] += seconds
    return StepGroups(**{**sums, "launches": launches}, bubble=bubble)


def together_s(busy: float, launches: float) -> float:
    """Return the seconds of the GPU's work and the host's launches, which overlap: a soft maximum."""
    longer, shorter = (busy, launches) if busy > launches else (launches, busy)
    return longer * (1 + (shorter / longer) ** SHARPNESS) ** (1 / SHARPNESS) if longer else 0.0
