"""The sizes that all activation formulas use, of one rank and one micro-batch."""

from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.hardware import Precision
from cloudai_mbridge.estimate.memory.layout import Adapters, Implementation, ParallelLayout

# Bytes per weight of one quantized copy, block scales included
QUANTIZED = {
    Precision.FP8_CS: 1.0,
    Precision.FP8_DS: 1.0,
    Precision.FP8_MX: 1 + 1 / 32,
    Precision.FP8_SC: 1 + 4 / (128 * 128),
    Precision.NVFP4: 0.5 + 1 / 16,
}
# Bytes per value of a quantized matrix product's input, kept for its weight gradient: as weights, in smaller blocks
_KEPT_INPUT = {**QUANTIZED, Precision.FP8_SC: 1 + 4 / 128}


@dataclass(frozen=True, eq=False)
class Sizes:
    """Of one rank and one micro-batch. Hashed by identity: `sizes_of` makes one object of equal sizes.

    tokens: of this rank's share of the sequence; split_tokens: of those, the ones it holds outside of the matrix
    products. expert_tokens: rows that its experts work on. value: bytes of an activation; kept_input: of a matrix
    product's input, which only fused kernels keep quantized. gathered_copies: of an input that the backward pass
    gathers over the tp ranks: NVFP4 is kept by rows, which are gathered, and by columns.
    """

    arch: Architecture
    mbs: int
    sequence: int
    whole_sequence: int
    tp: int
    expert_tp: int
    tokens: int
    split_tokens: int
    expert_tokens: float
    value: int
    kept_input: float
    fp32_logits: bool
    gathered_copies: int = 1
    adapters: Adapters | None = None

    def kept(self, linear: str) -> float:
        """Return the bytes per value that a fused linear layer, or its adapter, keeps of its input.

        A frozen layer needs none for itself; an adapter reads it in 16 bits.
        """
        if self.adapters is None:
            return self.kept_input
        return self.value if self.adapters.parts_of(linear) else 0

    @property
    def heads(self) -> int:
        """Attention heads of this rank."""
        return self.arch.num_attention_heads // self.tp

    @property
    def query(self) -> int:
        """Width of the queries of this rank."""
        return self.arch.kv_channels * self.arch.num_attention_heads // self.tp

    @property
    def key(self) -> int:
        """Width of the keys of this rank; the values are as wide. Groups fewer than ranks are repeated."""
        return self.arch.kv_channels * max(self.arch.num_query_groups // self.tp, 1)

    @property
    def has_rope(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.arch.position_embedding_type in ("rope", "yarn")

    @property
    def checkpoint(self) -> float:
        """Bytes that one fully recomputed group of layers keeps."""
        return float(self.split_tokens * self.arch.hidden_size * self.value)

    @property
    def latent_query(self) -> int:
        """Width of one head's query, of multi-latent attention."""
        return self.arch.qk_head_dim + self.arch.qk_pos_emb_head_dim


def sizes_of(arch: Architecture, layout: ParallelLayout) -> Sizes:
    """Return the sizes of a layout; equal sizes are one object, so that results computed from them can be cached."""
    whole = layout.seq_length or arch.seq_length
    tokens = layout.mbs * whole // layout.cp
    split = tokens // layout.tp if layout.has_sequence_parallel else tokens
    value = layout.precision.activation_bytes
    is_fused = layout.implementation is Implementation.FUSED
    return _sizes(
        arch,
        layout.mbs,
        whole // layout.cp,
        whole,
        layout.tp,
        layout.expert_tp,
        tokens,
        split,
        split * arch.moe_router_topk * layout.expert_tp * layout.moe_imbalance,
        value,
        _KEPT_INPUT.get(layout.precision, float(value)) if is_fused else float(value),
        layout.fp32_logits,
        2 if is_fused and layout.has_sequence_parallel and layout.precision is Precision.NVFP4 else 1,
        layout.adapters,
    )


_sizes = lru_cache(maxsize=65536)(Sizes)


@dataclass(frozen=True)
class SavedBytes:
    """One half of a layer: a norm, and the attention or feed-forward network behind it. Bytes of one micro-batch.

    norm: the norm's input and statistics. norm_output: its output, which the next products keep. latents: of
    multi-latent attention, what queries, keys and values are projected from. projected: those. core: scores or their
    sums, and what else only the core attention keeps. output: what the last projection keeps. ffn: inside of an MLP.
    adapters: what these keep beside it.
    router: routing and dispatch. experts: inside of the routed experts; expert_hidden: of that, what their activation
    function reads; expert_activation: what their second product does. shared: inside of the shared experts.
    """

    norm: float = 0
    norm_output: float = 0
    latents: float = 0
    projected: float = 0
    core: float = 0
    output: float = 0
    ffn: float = 0
    router: float = 0
    experts: float = 0
    expert_hidden: float = 0
    expert_activation: float = 0
    shared: float = 0
    adapters: float = 0

    @property
    def total(self) -> float:
        """All bytes."""
        return float(sum(_VALUES(self)))


_VALUES = attrgetter(*(field.name for field in fields(SavedBytes)))
