"""Memory on a GPU in addition to states and activations: assumptions with reasons, each can be overridden.

None of these follows from a formula of the model. The values are round numbers for one process per GPU with NCCL and
Transformer Engine; calibrate them if measurements on a cluster differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.memory.sizes import Sizes
from cloudai_mbridge.estimate.memory.stages import Chunk

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Assumptions:
    """Constants in bytes, or as shares.

    cuda_context: driver context and loaded kernels: what nvidia-smi shows of a process that has allocated nothing, with
    the kernels of torch, cuBLAS, cuDNN and Transformer Engine loaded. nccl_per_group: buffers of one communicator
    (16 to 32 channels of 4 MiB buffers per direction, NCCL's defaults). workspace: cuBLAS (32 MiB per stream on Hopper
    and later; several streams) and grouped products. fragmentation: what the caching allocator holds beyond what is in
    use, as a share of all that comes and goes (with expandable segments). p2p_buffers: activations on their way between
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
) -> dict[str, float]:
    """Return the bytes of every term of a stage."""
    has_experts = any(chunk.has_experts for chunk in chunks)
    temporary = _temporary(z, chunks)
    # the tokens that experts receive, and send back: sorted, received, and computed
    dispatched = 3 * z.expert_tokens * (z.arch.moe_latent_size or z.arch.hidden_size) * z.value
    dispatch = dispatched if has_experts else 0.0
    passing = sum(activations.values()) + temporary + dispatch
    hidden = z.split_tokens * z.arch.hidden_size * z.value
    return {
        "temporary": temporary,
        "dispatch buffers": dispatch,
        "p2p buffers": assumptions.p2p_buffers * hidden if layout.pp > 1 else 0.0,
        "cuda graphs": _graphs(layout, chunks) * hidden,
        "nccl": _num_groups(layout, has_experts) * assumptions.nccl_per_group,
        "cuda context": assumptions.cuda_context,
        "workspace": assumptions.workspace,
        "fragmentation": assumptions.fragmentation * passing,
    }


def _num_groups(layout: ParallelLayout, has_experts: bool) -> int:
    """Return the number of communicators with more than one rank that move data in a step."""
    dense = (layout.tp, layout.pp, layout.cp, layout.dp * layout.cp)
    experts = (layout.ep * layout.expert_tp, layout.expert_dp) if has_experts else ()
    return sum(size > 1 for size in (*dense, *experts))


def _temporary(z: Sizes, chunks: tuple[Chunk, ...]) -> float:
    """Return the largest temporary memory of one operation: an MLP's gradients, or the gradients of the logits.

    Transformer Engine's cross entropy writes the gradient over the logits.
    """
    a = z.arch
    ffn = a.ffn_hidden_size * (3 if a.gated_linear_unit else 2) / z.tp
    experts = (a.moe_ffn_hidden_size or 0) * (3 if a.gated_linear_unit else 2) / z.expert_tp
    most = max(z.tokens * (ffn + 2 * a.hidden_size), z.expert_tokens * experts if a.num_moe_experts else 0) * z.value
    if any(chunk.has_output for chunk in chunks):
        most = max(most, z.tokens * (a.padded_vocab_size // z.tp) * (2 if z.fp32_logits else 0))
    return most


def _graphs(layout: ParallelLayout, chunks: tuple[Chunk, ...]) -> int:
    """Return the static tensors of CUDA graphs: an input and an output per captured layer and micro-batch in flight.

    Tensors that a graph's layers keep for the backward pass lie in its pool, not the allocator's, and count there.
    """
    if layout.cuda_graph == "none":
        return 0
    layers = sum(len(chunk.layers) for chunk in chunks)
    return 2 * layers * min(layout.pp, layout.num_microbatches)
