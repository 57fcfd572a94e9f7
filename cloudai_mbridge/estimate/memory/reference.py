"""The two memory estimators of Megatron-Bridge, by name, for comparison with its published and logged numbers.

Both answer for the most loaded GPU, assume selective recomputation and sequence parallelism (else Megatron-Bridge
prints the weights alone), and know no overhead. One virtual stage counts as none. Stages of unequal size are refused.
`megatron-bridge/seed` ignores expert and context parallelism and multiplies the dense feed-forward size by the number
of experts; `megatron-bridge/head` knows experts. Neither knows multi-latent attention. Source: Megatron-Bridge,
`training/utils/theoretical_memory_utils.py`, of 2025 and of its newest version.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import Layout
from cloudai_mbridge.estimate.memory.parameters import padded_for


@dataclass(frozen=True)
class ReferenceEstimate:
    """Bytes of the most loaded GPU, and the parameters of the whole model as the estimator counts them."""

    weight_and_optimizer: float
    activation: float
    parameters: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.weight_and_optimizer + self.activation

    def line(self) -> str:
        """Return the line that Megatron-Bridge prints, in MiB."""
        weights, activation, total = (
            value / 2**20 for value in (self.weight_and_optimizer, self.activation, self.total)
        )
        return (
            f"Theoretical memory footprints: weight and optimizer={weights:.2f} MB, "
            f"activation={activation:.2f} MB, total={total:.2f} MB\n"
        )


def seed(arch: Architecture, layout: Layout) -> ReferenceEstimate:
    """Estimate as Megatron-Bridge did at first.

    Raises:
        BadInput: the first or last stage has a size of its own.
    """
    _refuse_uneven(arch)
    arch = padded_for(arch, layout.tp)
    h, layers, p, t = arch.hidden_size, arch.num_layers, layout.pp, layout.tp
    ratio = arch.ffn_hidden_size / h
    ffn = ratio * (arch.num_moe_experts or 1) * _gate(arch)
    in_layers = 2 * layers * h * h * (_attention(arch) + ffn + 2 / h + 1 / (layers * h))
    embedding = h * arch.padded_vocab_size
    shard = (in_layers / p + embedding) / t + (embedding / t if _has_own_output(arch) and p == 1 else 0)
    per_weight = 6 + 12 / layout.dp if layout.use_distributed_optimizer else 18
    total = in_layers + embedding * (2 if _has_own_output(arch) else 1)
    return ReferenceEstimate(shard * per_weight, _activation(arch, layout, ratio) / t, total)


def head(arch: Architecture, layout: Layout) -> ReferenceEstimate:
    """Estimate as Megatron-Bridge's newest version does.

    Raises:
        BadInput: the first or last stage has a size of its own.
    """
    _refuse_uneven(arch)
    arch = padded_for(arch, layout.tp)
    h, p, t, e, e_t = arch.hidden_size, layout.pp, layout.tp, layout.ep, layout.expert_tp
    dense, routed = _head_parameters(arch)
    embedding = h * arch.padded_vocab_size
    dense_shard = dense / (p * t) + embedding / t + (embedding / t if _has_own_output(arch) and p == 1 else 0)
    copies, expert_copies = layout.dp * layout.cp, max(1, layout.dp * t * layout.cp // (e * e_t))
    if not layout.use_distributed_optimizer:
        copies = expert_copies = 1
    weights = dense_shard * (6 + 12 / copies) + routed / (p * e * e_t) * (6 + 12 / expert_copies)
    total = dense + routed + embedding * (2 if _has_own_output(arch) else 1)
    return ReferenceEstimate(weights, _activation(arch, layout, _ffn_ratio(arch)) / (t * layout.cp), total)


REFERENCES: Mapping[str, Callable[[Architecture, Layout], ReferenceEstimate]] = {
    "megatron-bridge/seed": seed,
    "megatron-bridge/head": head,
}


def _gate(arch: Architecture) -> float:
    return 1.5 if arch.gated_linear_unit and arch.activation == "silu" else 1.0


def _attention(arch: Architecture) -> float:
    query = arch.kv_channels * arch.num_attention_heads / arch.hidden_size
    return (1 + arch.num_query_groups / arch.num_attention_heads) * query


def _has_own_output(arch: Architecture) -> bool:
    return not arch.share_embeddings_and_output_weights


def _layer_counts(arch: Architecture) -> tuple[int, int]:
    """Return the numbers of dense and of expert layers; those of multi-token prediction are of the last one's kind."""
    freq, layers, mtp = arch.moe_layer_freq, arch.num_layers, arch.mtp_num_layers
    if arch.num_moe_experts is None:
        return layers + mtp, 0
    kinds = [index % freq == 0 for index in range(layers)] if isinstance(freq, int) else [bool(kind) for kind in freq]
    kinds += kinds[-1:] * mtp
    return len(kinds) - sum(kinds), sum(kinds)


def _head_parameters(arch: Architecture) -> tuple[float, float]:
    """Return the parameters of the layers: what every rank of a stage has a share of, and the routed experts."""
    h, (dense_layers, expert_layers) = arch.hidden_size, _layer_counts(arch)
    products = 2 * _gate(arch)
    ffn = arch.moe_ffn_hidden_size or arch.ffn_hidden_size
    shared, latent = arch.moe_shared_expert_intermediate_size or 0, arch.moe_latent_size or 0
    every = 2 * h * h * _attention(arch) + 4 * h
    dense = (dense_layers + expert_layers) * every + dense_layers * products * h * arch.ffn_hidden_size
    dense += expert_layers * (products * h * shared + 2 * h * latent) + 2 * h
    return dense, expert_layers * products * (latent or h) * ffn * (arch.num_moe_experts or 0)


def _ffn_ratio(arch: Architecture) -> float:
    """Return the feed-forward width that a token meets, over the hidden size, averaged over the layers."""
    dense, experts = _layer_counts(arch)
    active = (arch.moe_ffn_hidden_size or arch.ffn_hidden_size) * arch.moe_router_topk
    active += arch.moe_shared_expert_intermediate_size or 0
    return (dense * arch.ffn_hidden_size + experts * active) / ((dense + experts) * arch.hidden_size)


def _activation(arch: Architecture, layout: Layout, ffn_ratio: float) -> float:
    """Return the activations of all tensor- and context-parallel ranks together."""
    h, p, tokens = arch.hidden_size, layout.pp, layout.mbs * (layout.seq_length or arch.seq_length)
    in_flight = tokens * h * (18 + 4 * ffn_ratio) * arch.num_layers + 8 * tokens * p + tokens * h * p
    at_end = 4 * tokens * h * (1 + arch.padded_vocab_size / h) if p == 1 else 0
    return in_flight * _stage_factor(layout) + at_end


def _refuse_uneven(arch: Architecture) -> None:
    if (arch.num_layers_in_first_pipeline_stage, arch.num_layers_in_last_pipeline_stage) != (None, None):
        raise BadInput("a reference estimator of memory knows no first or last stage of its own; use the default one")


def _stage_factor(layout: Layout) -> float:
    if layout.vp > 1:
        return 1 + (layout.pp - 1) / (layout.pp * layout.vp)
    if layout.pp > 1 and layout.gbs is not None:
        return min(1.0, layout.num_microbatches / layout.pp)
    return 1.0
