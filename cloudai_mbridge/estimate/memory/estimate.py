"""Memory of every pipeline stage, as named terms that add up: states, activations, other.

Also the memory of many layouts, and the two estimators of Megatron-Bridge, by name, for comparison with its published
and logged numbers. These answer for the most loaded GPU, assume selective recomputation and sequence parallelism (else
Megatron-Bridge prints the weights alone), and ignore overhead. One virtual stage counts as none. Stages of unequal size
are refused. `megatron-bridge/seed`, of 2025, ignores expert and context parallelism and multiplies the dense
feed-forward size by the number of experts; `megatron-bridge/head` models experts and is logged by the training loop.
Neither models multi-latent attention.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter

from cloudai_mbridge.errors import NotModelled
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Precision
from cloudai_mbridge.estimate.memory.activations import activations_per_stage
from cloudai_mbridge.estimate.memory.adapter_parameters import adapters_per_stage
from cloudai_mbridge.estimate.memory.layout import Granularity, Implementation, ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import (
    Chunk,
    Layer,
    RankParameters,
    chunks_of,
    layer_parameters,
    padded_for,
    parameters_per_stage,
)
from cloudai_mbridge.estimate.memory.sizes import QUANTIZED, Sizes, sizes_of
from cloudai_mbridge.training.reporting import theoretical_memory as formulas
from cloudai_mbridge.training.reporting.theoretical_memory import Split, TheoreticalMemory

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
    if not copy or not layout.fp8_param_gather:
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
    return _stepped(parameters, layout) * per_weight


def _stepped(parameters: RankParameters, layout: ParallelLayout) -> float:
    """Return the number of weights that the optimizer of a rank steps on its GPU."""
    on_device = 1 - layout.optimizer_offload_fraction
    if not (layout.use_distributed_optimizer or layout.use_megatron_fsdp):
        return parameters.total * on_device
    between = layout.use_megatron_fsdp and layout.outer_dp_sharding_strategy != "no_shard"
    shards, expert_shards = (layout.dp * layout.cp, layout.expert_dp) if between else _shards(layout)
    return (parameters.dense / shards + parameters.experts / expert_shards) * on_device


def gradient_copy(stepped: RankParameters, layout: ParallelLayout) -> float:
    """Return the bytes of the 32-bit copy that Megatron-Core's optimizer makes of the rank's share of 16-bit gradients.

    Megatron-FSDP has its gradients in 32 bits, or reads them as they are.
    """
    has_copy = not (layout.grad_reduce_in_fp32 or layout.precision.is_32_bit or layout.use_megatron_fsdp)
    return 4.0 * _stepped(stepped, layout) if has_copy else 0.0


MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Assumptions:
    """Constants in bytes, or as shares.

    cuda_context: driver context and loaded kernels: what nvidia-smi shows of a process that has allocated nothing, with
    the kernels of torch, cuBLAS, cuDNN and Transformer Engine loaded. nccl_per_group: buffers of one communicator
    (16 to 32 channels of 4 MiB buffers per direction, NCCL's defaults). workspace: cuBLAS (32 MiB per stream on Hopper
    and later; several streams) and grouped products. fragmentation: what the caching allocator holds beyond what is in
    use, as a share of all that comes and goes; none with expandable segments, whose unused pages are unmapped before
    memory runs out. p2p_buffers: activations on their way between
    stages. measured: the factor of a cluster on all terms together.
    """

    cuda_context: float = 0.75 * GIB
    nccl_per_group: float = 192 * MIB
    workspace: float = 256 * MIB
    fragmentation: float = 0.04
    p2p_buffers: int = 4
    measured: float = 1.0


NOTHING = Assumptions(cuda_context=0, nccl_per_group=0, workspace=0, fragmentation=0, p2p_buffers=0)


def other(
    z: Sizes,
    layout: ParallelLayout,
    chunks: tuple[Chunk, ...],
    activations: Mapping[str, float],
    assumptions: Assumptions,
    copied: float = 0.0,
) -> dict[str, float]:
    """Return the bytes of every term of a stage.

    copied: for the optimizer's step, in which activations and temporary tensors are gone: what it needs beyond them.
    """
    has_experts = any(chunk.has_experts for chunk in chunks)
    temporary = _temporary(z, chunks)
    # the tokens that experts receive, and send back: sorted, received, and computed
    dispatched = 3 * z.expert_tokens * (z.arch.moe_latent_size or z.arch.hidden_size) * z.value
    dispatch = dispatched if has_experts else 0.0
    passing = sum(activations.values()) + temporary + dispatch
    hidden = z.split_tokens * z.arch.hidden_size * z.value
    # communicators with more than one rank move data in a step
    groups = [layout.tp, layout.pp, layout.cp, layout.dp * layout.cp]
    groups += [layout.ep * layout.expert_tp, layout.expert_dp] if has_experts else []
    captured = 0
    if layout.cuda_graph != "none":
        # static tensors: an input and an output per captured layer and micro-batch in flight. What a graph's layers
        # keep for the backward pass lies in its pool, not the allocator's, and counts there
        captured = 2 * sum(len(chunk.layers) for chunk in chunks) * min(layout.pp, layout.num_microbatches)
    return {
        "temporary": temporary,
        "dispatch buffers": dispatch,
        "p2p buffers": assumptions.p2p_buffers * hidden if layout.pp > 1 else 0.0,
        "cuda graphs": captured * hidden,
        "nccl": sum(size > 1 for size in groups) * assumptions.nccl_per_group,
        "cuda context": assumptions.cuda_context,
        "workspace": assumptions.workspace,
        "optimizer step": max(copied - passing, 0.0),
        "fragmentation": assumptions.fragmentation * max(passing, copied),
    }


def _temporary(z: Sizes, chunks: tuple[Chunk, ...]) -> float:
    """Return the largest temporary memory of one operation: an MLP's gradients, or the logits beside their copy."""
    a = z.arch
    ffn = a.ffn_hidden_size * (3 if a.gated_linear_unit else 2) / z.tp
    experts = (a.moe_ffn_hidden_size or 0) * (3 if a.gated_linear_unit else 2) / z.expert_tp
    most = max(z.tokens * (ffn + 2 * a.hidden_size), z.expert_tokens * experts if a.num_moe_experts else 0) * z.value
    if any(chunk.has_output for chunk in chunks):
        most = max(most, z.tokens * (a.padded_vocab_size // z.tp) * z.value)
    return most


STATE_TERMS = ("weights", "quantized copies", "gradients", "optimizer", "fsdp buffers")
ACTIVATION_TERMS = ("attention", "mlp", "experts", "checkpoints", "embedding", "logits", "recomputed")
OTHER_TERMS = (
    *("temporary", "dispatch buffers", "p2p buffers", "cuda graphs"),
    *("nccl", "cuda context", "workspace", "optimizer step", "fragmentation", "as measured"),
)


@dataclass(frozen=True)
class StageMemory:
    """A rank of one pipeline stage. total, terms: bytes. copied: for the optimizer's step."""

    stage: int
    parameters: int
    total: float
    total_gib: float
    terms: Mapping[str, float]
    copied: float = 0.0

    @property
    def passing(self) -> float:
        """Bytes that are gone when the optimizer steps."""
        return self.activations + self.terms["temporary"] + self.terms["dispatch buffers"]

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer, in bytes."""
        return sum(self.terms[name] for name in STATE_TERMS)

    @property
    def activations(self) -> float:
        """Bytes that micro-batches in flight keep for their backward passes."""
        return sum(self.terms[name] for name in ACTIVATION_TERMS)


def memory_per_stage(
    arch: Architecture, layout: ParallelLayout, assumptions: Assumptions | None = None
) -> tuple[StageMemory, ...]:
    """Return the memory of every pipeline stage.

    BadInput: the layers cannot be split over the stages so, or the model has layers that are not modelled.
    """
    return _stages(padded_for(arch, layout.tp), layout, assumptions or Assumptions())


def worst_stage(stages: tuple[StageMemory, ...]) -> StageMemory:
    """Return the stage that needs most memory, of equal stages the first."""
    return max(stages, key=lambda stage: stage.total)


@lru_cache(maxsize=4096)
def _stages(arch: Architecture, layout: ParallelLayout, assumptions: Assumptions) -> tuple[StageMemory, ...]:
    z, chunks = sizes_of(arch, layout), chunks_of(arch, layout)
    parameters, adapters = parameters_per_stage(arch, layout), adapters_per_stage(arch, layout)
    activations = activations_per_stage(arch, layout)
    known: dict[tuple[tuple[Chunk, ...], int], Mapping[str, float]] = {}
    stages = []
    for rank, own in enumerate(chunks):
        key = (own, id(activations[rank]))  # equal stages share one object
        copied = gradient_copy(parameters[rank] if layout.adapters is None else adapters[rank], layout)
        if key not in known:
            terms = states(parameters[rank], layout, _unsharded(arch, layout, own, parameters[rank]), adapters[rank])
            terms |= activations[rank] | other(z, layout, own, activations[rank], assumptions, copied)
            terms["as measured"] = (assumptions.measured - 1) * sum(terms.values())
            known[key] = {name: float(terms[name]) for name in TERMS}
        total, count = sum(known[key].values()), parameters[rank].total + adapters[rank].total
        stages.append(StageMemory(rank, count, total, total / GIB, {**known[key]}, copied))
    return tuple(stages)


TERMS = STATE_TERMS + ACTIVATION_TERMS + OTHER_TERMS


def _unsharded(
    arch: Architecture, layout: ParallelLayout, chunks: tuple[Chunk, ...], parameters: RankParameters
) -> int:
    """Return the parameters gathered by Megatron-FSDP: layers one by one, the embedding and the output layer on use."""
    if not layout.use_megatron_fsdp:
        return 0
    layers = frozenset[Layer]().union(*(chunk.kinds for chunk in chunks))
    largest = max((layer_parameters(arch, layout, layer) for layer in layers), default=0)
    rest = sum(parameters.by_module.get(name, 0) for name in ("embedding", "output_layer"))
    return 2 * largest + rest  # one layer in use, the next one on its way


_VARYING = ("gbs", "num_gpus", "mbs", "seq_length")
_SHARED = attrgetter(*(field.name for field in fields(ParallelLayout) if field.name not in _VARYING))
_CONSTANT = ("nccl", "cuda context", "workspace")
# In an interleaved schedule the fullest moment comes within as many groups of pp micro-batches
_WHOLE_GROUPS, _GROUPS = 2, 4


class StageTotals:
    """Memory of the stages of layouts that differ in data-parallel copies and tokens: a + b / dp + c tokens.

    Two numbers of copies determine a and b; one number of tokens determines c, if `kind_of` leaves them out. What the
    optimizer's step needs beyond what comes and goes is added: a' + b' / dp - c' tokens, if that is positive.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._fixed: dict[int, tuple[float, ...]] = {}
        self._line: tuple[tuple[float, float], ...] | None = None
        self._per_token: tuple[float, ...] = ()

    def fullest(self, model: Architecture, layout: ParallelLayout) -> tuple[float, int, float]:
        """Return bytes and number of the fullest stage, and the most bytes of states and activations of a stage.

        model, layout: of one `kind_of` in every call. Raises as `memory_per_stage` does.
        """
        fixed = self._fixed.get(layout.dp)
        if fixed is None and self._line is not None:
            fixed = tuple([a + b / layout.dp for a, b in self._line])
        tokens = layout.mbs * (layout.seq_length or model.seq_length) / layout.cp  # of a micro-batch on a rank
        if fixed is None:
            fixed = self._learn(layout.dp, tokens, memory_per_stage(model, layout, self._assumptions))
        values = [a + c * tokens for a, c in zip(fixed, self._per_token, strict=True)]
        count = len(values) // 3
        step = self._assumptions.measured * (1 + self._assumptions.fragmentation)
        totals = [total + step * max(0.0, beyond) for total, beyond in zip(values, values[2 * count :], strict=False)]
        most = max(totals)
        return most, totals.index(most), max(values[count : 2 * count])

    def _learn(self, dp: int, tokens: float, stages: Sequence[StageMemory]) -> tuple[float, ...]:
        """Store the values of the stages: all terms of each but that step, states and activations, that step."""
        measured, share = self._assumptions.measured, self._assumptions.fragmentation
        constant = [stage.states + sum(stage.terms[name] for name in _CONSTANT) for stage in stages]
        fixed = (
            *(measured * each for each in constant),
            *(stage.states for stage in stages),
            *(stage.copied for stage in stages),
        )
        step = [measured * (1 + share) * stage.terms["optimizer step"] for stage in stages]
        moving = (
            *(stage.total - beyond for stage, beyond in zip(stages, step, strict=True)),
            *(stage.states + stage.activations for stage in stages),
            *(stage.copied - stage.passing for stage in stages),
        )
        self._per_token = tuple([(total - a) / tokens for total, a in zip(moving, fixed, strict=True)])
        for other, others in self._fixed.items():
            slopes = [(y - z) / (1 / dp - 1 / other) for y, z in zip(fixed, others, strict=True)]
            self._line = tuple([(y - slope / dp, slope) for y, slope in zip(fixed, slopes, strict=True)])
        self._fixed[dp] = fixed
        return fixed


def kind_of(model: Architecture, layout: ParallelLayout) -> Hashable:
    """Return a key that layouts share whose memory differs by data-parallel copies and tokens alone.

    It includes the lengths that memory depends on in addition to the tokens: none, for whole shares of a fused kernel.
    """
    tokens = layout.mbs * (layout.seq_length or model.seq_length)
    is_linear = layout.implementation is Implementation.FUSED and model.position_embedding_type != "learned_absolute"
    lengths: Hashable = None
    if not is_linear or tokens % (layout.cp * layout.tp):
        lengths = layout.mbs, layout.seq_length or model.seq_length
    elif layout.recompute.granularity is Granularity.FULL:
        lengths = layout.mbs  # a chunk keeps rotation angles of the sequence, whatever the number of sequences
    copies = (layout.dp > 1, layout.dp * layout.cp > 1, layout.expert_dp > 1)
    return _without_length(model), _SHARED(layout), _microbatches(layout), lengths, copies


@lru_cache(maxsize=4096)
def _without_length(model: Architecture) -> Architecture:
    return replace(model, seq_length=1)


def _microbatches(layout: ParallelLayout) -> int:
    """Return a number of micro-batches with the same memory: further micro-batches repeat the schedule."""
    if layout.vp == 1 or layout.pp == 1:
        return min(layout.num_microbatches, layout.pp)
    groups, rest = divmod(layout.num_microbatches, layout.pp)
    return min(groups, _WHOLE_GROUPS if rest == 0 else _GROUPS) * layout.pp + rest


def seed(arch: Architecture, layout: ParallelLayout) -> TheoreticalMemory:
    """Estimate as Megatron-Bridge did at first; BadInput if the first or last stage has a size of its own."""
    arch, split = _prepared(arch, layout)
    h, layers, p, t = arch.hidden_size, arch.num_layers, split.pp, split.tp
    ffn = arch.ffn_hidden_size / h * (arch.num_moe_experts or 1) * (1.5 if _is_swiglu(arch) else 1.0)
    in_layers = 2 * layers * h * h * (formulas.attention_share(arch) + ffn + 2 / h + 1 / (layers * h))
    embedding, untied = h * arch.padded_vocab_size, int(not arch.share_embeddings_and_output_weights)
    shard = (in_layers / p + embedding) / t + (embedding / t if untied and p == 1 else 0)
    weights = shard * formulas.bytes_per_parameter(split, split.dp)
    activation = formulas.activation_bytes(arch, split, arch.ffn_hidden_size) / t
    return TheoreticalMemory(round(in_layers + embedding * (1 + untied)), weights, activation)


def head(arch: Architecture, layout: ParallelLayout) -> TheoreticalMemory:
    """Estimate as Megatron-Bridge's newest version does; BadInput as for `seed`."""
    return formulas.memory_of_model(*_prepared(arch, layout), is_swiglu=_is_swiglu(arch))


REFERENCES: Mapping[str, Callable[[Architecture, ParallelLayout], TheoreticalMemory]] = {
    "megatron-bridge/seed": seed,
    "megatron-bridge/head": head,
}


def _is_swiglu(arch: Architecture) -> bool:
    return arch.gated_linear_unit and arch.activation == "silu"


def _prepared(arch: Architecture, layout: ParallelLayout) -> tuple[Architecture, Split]:
    if (arch.num_layers_in_first_pipeline_stage, arch.num_layers_in_last_pipeline_stage) != (None, None):
        raise NotModelled(
            "a reference estimator of memory knows no first or last stage of its own; use the default one"
        )
    split = Split(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.expert_tp,
        dp=layout.dp,
        vp=layout.vp if layout.vp > 1 else None,
        seq_length=layout.seq_length or arch.seq_length,
        micro_batch_size=layout.mbs,
        num_microbatches=None if layout.gbs is None else layout.num_microbatches,
        is_sharded=layout.use_distributed_optimizer,
    )
    return padded_for(arch, layout.tp), split
