"""The two memory estimators of Megatron-Bridge, by name, for comparison with its published and logged numbers.

Both answer for the most loaded GPU, assume selective recomputation and sequence parallelism (else Megatron-Bridge
prints the weights alone), and ignore overhead. One virtual stage counts as none. Stages of unequal size are refused.
`megatron-bridge/seed`, of 2025, ignores expert and context parallelism and multiplies the dense feed-forward size by
the number of experts; `megatron-bridge/head` models experts and is logged by the training loop. Neither models
multi-latent attention.
"""

from collections.abc import Callable, Mapping

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.memory.parameters import padded_for
from cloudai_mbridge.training.reporting import theoretical_memory as formulas
from cloudai_mbridge.training.reporting.theoretical_memory import Split, TheoreticalMemory


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
        raise BadInput("a reference estimator of memory knows no first or last stage of its own; use the default one")
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
