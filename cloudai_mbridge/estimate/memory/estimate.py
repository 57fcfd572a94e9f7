"""The answer: memory of every pipeline stage, as named terms that add up."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.activations import activations_per_stage
from cloudai_mbridge.estimate.memory.adapter_parameters import adapters_per_stage
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.memory.other import GIB, Assumptions, other
from cloudai_mbridge.estimate.memory.parameters import (
    RankParameters,
    layer_parameters,
    padded_for,
    parameters_per_stage,
)
from cloudai_mbridge.estimate.memory.sizes import sizes_of
from cloudai_mbridge.estimate.memory.stages import Chunk, Layer, chunks_of
from cloudai_mbridge.estimate.memory.states import states

STATE_TERMS = ("weights", "quantized copies", "gradients", "optimizer", "fsdp buffers")
ACTIVATION_TERMS = ("attention", "mlp", "experts", "checkpoints", "embedding", "logits", "recomputed")
OTHER_TERMS = (
    *("temporary", "dispatch buffers", "p2p buffers", "cuda graphs"),
    *("nccl", "cuda context", "workspace", "fragmentation", "as measured"),
)


@dataclass(frozen=True)
class StageMemory:
    """A rank of one pipeline stage. terms: name -> bytes; all names are there, in the order of the tuples above."""

    stage: int
    parameters: int
    terms: Mapping[str, float]
    is_worst: bool = False

    @property
    def total(self) -> float:
        """All terms, in bytes."""
        return sum(self.terms.values())

    @property
    def total_gib(self) -> float:
        """All terms, in GiB."""
        return self.total / GIB

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
    """Return the memory of every pipeline stage, the worst stage marked (of equal stages the first).

    BadInput: the layers cannot be split over the stages so, or the model has layers that are not modelled.
    """
    stages = _stages(padded_for(arch, layout.tp), layout, assumptions or Assumptions())
    worst = max(stages, key=lambda stage: stage.total).stage
    return tuple(replace(stage, is_worst=True) if stage.stage == worst else stage for stage in stages)


def worst_stage(stages: tuple[StageMemory, ...]) -> StageMemory:
    """Return the stage that needs most memory."""
    return next(stage for stage in stages if stage.is_worst)


@lru_cache(maxsize=4096)
def _stages(arch: Architecture, layout: ParallelLayout, assumptions: Assumptions) -> list[StageMemory]:
    z, chunks = sizes_of(arch, layout), chunks_of(arch, layout)
    parameters, adapters = parameters_per_stage(arch, layout), adapters_per_stage(arch, layout)
    activations = activations_per_stage(arch, layout)
    known: dict[tuple[tuple[Chunk, ...], int], Mapping[str, float]] = {}
    stages = []
    for rank, own in enumerate(chunks):
        key = (own, id(activations[rank]))  # equal stages share one object
        if key not in known:
            terms = states(parameters[rank], layout, _unsharded(arch, layout, own, parameters[rank]), adapters[rank])
            terms |= activations[rank] | other(z, layout, own, activations[rank], assumptions)
            terms["as measured"] = (assumptions.measured - 1) * sum(terms.values())
            known[key] = MappingProxyType({name: float(terms[name]) for name in TERMS})
        stages.append(StageMemory(rank, parameters[rank].total + adapters[rank].total, known[key]))
    return stages


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
