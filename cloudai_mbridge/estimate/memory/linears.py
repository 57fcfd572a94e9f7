"""The linear layers of a mixer or feed-forward network, and the ranks over which they are split.

Source: as of `parameters`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import Implementation, ParallelLayout


@dataclass(frozen=True)
class ParameterSplit:
    """Numbers of ranks by which parameters are split."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    has_te: bool = True


def split_of(layout: ParallelLayout) -> ParameterSplit:
    """Return the numbers of ranks over which a layout splits parameters."""
    return ParameterSplit(layout.tp, layout.ep, layout.expert_tp, layout.implementation is Implementation.FUSED)


class Linear(NamedTuple):
    """A linear layer of the whole model, over `ranks` of which its output is split, or its input (is_row).

    parts: name and outputs of those of a fused layer. experts: of routed experts on this rank, 0 for another layer.
    has_split_tokens: its input is not gathered over the tensor-parallel ranks. times: how often a token meets it.
    """

    name: str
    inputs: int
    outputs: int
    ranks: int = 1
    is_row: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    experts: int = 0
    has_split_tokens: bool = False
    times: float = 1

    @property
    def multiply_adds(self) -> float:
        """Multiply-adds of one token."""
        return self.inputs * self.outputs * self.times


@lru_cache(maxsize=1024)
def linears(arch: Architecture, split: ParameterSplit, half: str) -> tuple[Linear, ...]:
    """Return the linear layers of a mixer or feed-forward network: attention, mamba, mlp or moe."""
    return tuple(_LAYERS[half](arch, split))


def _attention_layers(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    if arch.multi_latent_attention:
        yield from _latent_attention_layers(arch, split)
        return
    h, q, kv = arch.hidden_size, arch.kv_channels * arch.num_attention_heads, arch.kv_channels * arch.num_query_groups
    outputs = q + 2 * kv + (q if arch.attention_output_gate else 0)
    parts = (("linear_q", q), ("linear_k", kv), ("linear_v", kv))
    yield Linear("linear_qkv", h, outputs, split.tp, parts=parts)
    yield Linear("linear_proj", q, h, split.tp, is_row=True)


def _latent_attention_layers(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    h, a, r_q, r_kv = arch.hidden_size, arch.num_attention_heads, arch.q_lora_rank, arch.kv_lora_rank
    d_q = arch.qk_head_dim + arch.qk_pos_emb_head_dim
    down, whole = 1 if split.has_te else split.tp, split.has_te
    if r_q is None:
        yield Linear("linear_q_proj", h, a * d_q, split.tp)
    else:
        yield Linear("linear_q_down_proj", h, r_q, down, has_split_tokens=whole)
        yield Linear("linear_q_up_proj", r_q, a * d_q, split.tp)
    yield Linear("linear_kv_down_proj", h, r_kv + arch.qk_pos_emb_head_dim, down, has_split_tokens=whole)
    yield Linear("linear_kv_up_proj", r_kv, a * (arch.qk_head_dim + arch.v_head_dim), split.tp)
    yield Linear("linear_proj", a * arch.v_head_dim, h, split.tp, is_row=True)


def _mamba_layers(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    heads = arch.mamba_num_heads or 2 * arch.hidden_size // arch.mamba_head_dim
    inner, states = heads * arch.mamba_head_dim, 2 * arch.mamba_num_groups * arch.mamba_state_dim
    yield Linear("in_proj", arch.hidden_size, 2 * inner + states + heads, split.tp)
    yield Linear("out_proj", inner, arch.hidden_size, split.tp, is_row=True)


def _mlp_layers(
    arch: Architecture, ffn: int, ranks: int, width: int | None = None, experts: int = 0
) -> Iterator[Linear]:
    width = arch.hidden_size if width is None else width
    gated = (("linear_fc1_gate", ffn), ("linear_fc1_up", ffn)) if arch.gated_linear_unit else ()
    yield Linear("linear_fc1", width, ffn * (len(gated) or 1), ranks, parts=gated, experts=experts)
    yield Linear("linear_fc2", ffn, width, ranks, is_row=True, experts=experts)


def _moe_layers(arch: Architecture, split: ParameterSplit) -> Iterator[Linear]:
    h, experts, latent = arch.hidden_size, arch.num_moe_experts or 0, arch.moe_latent_size
    yield Linear("router", h, experts, 1, has_split_tokens=True)
    yield from _mlp_layers(
        arch, arch.moe_ffn_hidden_size or arch.ffn_hidden_size, split.etp, latent, experts // split.ep
    )
    if latent:
        yield Linear("fc1_latent_proj", h, latent, 1, has_split_tokens=True)
        yield Linear("fc2_latent_proj", latent, h, 1, has_split_tokens=True)
    if arch.moe_shared_expert_intermediate_size:
        yield from _mlp_layers(arch, arch.moe_shared_expert_intermediate_size, split.tp)


_LAYERS = {
    "attention": _attention_layers,
    "mamba": _mamba_layers,
    "mlp": lambda arch, split: _mlp_layers(arch, arch.ffn_hidden_size, split.tp),
    "moe": _moe_layers,
}
