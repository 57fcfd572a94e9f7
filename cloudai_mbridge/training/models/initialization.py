"""Give every weight a value that depends on the seed and its global name alone: the same model under any parallel
layout. Megatron's own CPU initialisation is the same for any tensor-parallel size, not for any pipeline size."""

import math
import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state as mpu


@torch.no_grad()
def initialize_weights(model: torch.nn.Module, config: Any, seed: int) -> None:
    """Fill every matrix of `model` with this rank's shard of its global value; norms and biases keep theirs."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            global_name, tp, rank = _globalize(name, model, config)
            gated = config.gated_linear_unit and "linear_fc1" in name
            full = _full(parameter, global_name, tp, config, seed)
            value = _shard(full, _shard_dim(parameter), gated, tp, rank)
            parameter.copy_(value)
            # what the optimizer starts from: Transformer Engine keeps it beside an FP8 parameter
            read_kept = getattr(parameter, "get_high_precision_init_val", None)
            if read_kept is not None and (kept := read_kept()) is not None:
                kept.copy_(value)


def _globalize(name: str, model: Any, config: Any) -> tuple[str, int, int]:
    """Return the name with global layer and expert numbers, and the tensor-parallel size and rank that shard it."""
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        number = model.decoder.layers[int(layer[1])].layer_number - 1
        name = name.replace(layer[0], f"decoder.layers.{number}.", 1)
    if expert := re.search(r"local_experts\.(\d+)\.", name):
        experts_per_rank = config.num_moe_experts // config.expert_model_parallel_size
        number = int(expert[1]) + mpu.get_expert_model_parallel_rank() * experts_per_rank
        name = name.replace(expert[0], f"local_experts.{number}.")
        tp, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"  # the copy of the tied embedding on the last stage
    return name, tp, rank


def _full(parameter: torch.nn.Parameter, name: str, tp: int, config: Any, seed: int) -> torch.Tensor:
    std = config.init_method_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.num_layers)
    if getattr(config, "use_mup", False) and not name.startswith(("embedding.", "output_layer.")):
        std /= math.sqrt(config.mup_width_mult)
    shape = [size * tp if i == _shard_dim(parameter) else size for i, size in enumerate(parameter.shape)]
    device = "cpu" if config.use_cpu_initialization else parameter.device  # the same numbers on every device
    generator = torch.Generator(device).manual_seed((zlib.crc32(name.encode()) + seed) % 2**31)
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)


def _shard(full: torch.Tensor, dim: int, gated: bool, tp: int, rank: int) -> torch.Tensor:
    if dim < 0 or tp == 1:
        return full
    # Megatron shards gate and up projection separately, and stores them one after the other
    parts = full.chunk(2, dim) if gated else [full]
    return torch.cat([part.chunk(tp, dim)[rank] for part in parts], dim)


def _shard_dim(parameter: Any) -> int:
    return int(parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else -1
