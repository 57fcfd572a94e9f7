"""How much memory the weights, the optimizer and the activations should take on the most loaded GPU.

The formulas are Megatron-Bridge's. Every expert counts once, at its own width and sharded by the expert layout;
layers of multi-latent attention are counted as if their projections were the usual ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from cloudai_mbridge.training.flops import moe_layer_pattern
from cloudai_mbridge.training.process.log_lines import write_line

_MIB = 1024 * 1024


@dataclass(frozen=True)
class TheoreticalMemory:
    """Parameter counts of the model and bytes on the most loaded GPU."""

    parameters: int
    weight_and_optimizer: float
    activation: float


def theoretical_memory(cfg: Any, num_microbatches: int | None = None) -> TheoreticalMemory:
    """Return the estimate for a validated configuration.

    num_microbatches: of a step; fewer than there are stages leave some of the activation memory unused.
    """
    m = cfg.model
    dense, routed, embedding = _parameters(m)
    tp, pp, dp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, cfg.data_parallel_size
    cp, ep, etp = m.context_parallel_size, m.expert_model_parallel_size or 1, m.expert_tensor_parallel_size or 1
    untied = int(not m.share_embeddings_and_output_weights)
    dense_shard = dense / (pp * tp) + embedding / tp * (1 + (untied if pp == 1 else 0))
    routed_shard = routed / (pp * ep * etp)
    is_sharded = cfg.ddp.use_distributed_optimizer
    weight = dense_shard * _bytes_per_parameter(is_sharded, dp * cp)
    weight += routed_shard * _bytes_per_parameter(is_sharded, max(1, dp * tp * cp // (ep * etp)))
    parameters = dense + routed + embedding * (1 + untied)
    return TheoreticalMemory(round(parameters), weight, _activation(cfg, num_microbatches))


def report_theoretical_memory(cfg: Any, num_microbatches: int | None = None, verbose: bool = False) -> None:
    """Print the estimate in MiB. The activations are left out where the formula does not hold.

    It holds with sequence parallelism and selective recomputation. verbose: print the number of parameters too.
    """
    memory = theoretical_memory(cfg, num_microbatches)
    if verbose:
        write_line(f"Number of parameters in billions: {memory.parameters / 1e9:.2f}")
    weight, activation = memory.weight_and_optimizer / _MIB, memory.activation / _MIB
    line = f"Theoretical memory footprints: weight and optimizer={weight:.2f} MB"
    if cfg.model.sequence_parallel and cfg.model.recompute_granularity == "selective":
        line += f", activation={activation:.2f} MB, total={weight + activation:.2f} MB"
    write_line(line)


def _parameters(m: Any) -> tuple[float, float, int]:
    """Return (dense parameters without embeddings, parameters of routed experts, of one embedding)."""
    h, heads = m.hidden_size, m.num_attention_heads
    query = (m.kv_channels or h // heads) * heads
    groups = m.num_query_groups or heads
    projections = 3 if m.gated_linear_unit and m.activation_func in (F.silu, torch.nn.SiLU) else 2
    pattern = moe_layer_pattern(m)
    num_moe, num_dense = pattern.count(1), pattern.count(0)
    attention = 2 * h * h * (1 + groups / heads) * (query / h)
    shared = projections * h * (m.moe_shared_expert_intermediate_size or 0)
    expert = projections * h * (m.moe_ffn_hidden_size or m.ffn_hidden_size)
    dense = len(pattern) * (attention + 4 * h) + 2 * h
    dense += num_dense * projections * h * m.ffn_hidden_size + num_moe * shared
    return dense, num_moe * expert * (m.num_moe_experts or 0), h * m.padded_vocab_size


def _bytes_per_parameter(is_sharded: bool, replicas: int) -> float:
    """Half-precision weight, fp32 gradient; fp32 weight and Adam's two moments, which the replicas may share out."""
    return 6 + 12 / replicas if is_sharded else 18


def _activation(cfg: Any, num_microbatches: int | None) -> float:
    m, b = cfg.model, cfg.train.micro_batch_size
    s, h, pp, vp = m.seq_length, m.hidden_size, m.pipeline_model_parallel_size, m.virtual_pipeline_model_parallel_size
    pattern = moe_layer_pattern(m)
    moe_width = (m.moe_ffn_hidden_size or m.ffn_hidden_size) * m.moe_router_topk
    moe_width += m.moe_shared_expert_intermediate_size or 0
    width = pattern.count(0) * m.ffn_hidden_size + pattern.count(1) * moe_width
    in_layers = s * b * h * (18 * len(pattern) + 4 * width / h) + 8 * s * b * pp + s * b * h * pp
    if vp is not None:
        in_layers *= 1 + (pp - 1) / (pp * vp)  # stages hold micro-batches of several chunks
    elif pp > 1 and num_microbatches is not None:
        in_layers *= min(1, num_microbatches / pp)
    logits = 4 * s * b * h * (1 + m.padded_vocab_size / h) if pp == 1 else 0
    return float((in_layers + logits) / (m.tensor_model_parallel_size * m.context_parallel_size))
