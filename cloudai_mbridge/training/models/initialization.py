"""Give every weight a value that depends on the seed and its global name alone: the same model under any parallel
layout, on torch's layers and on Transformer Engine's. Megatron's own CPU initialisation is the same for any
tensor-parallel size, not for any pipeline size."""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from cloudai_mbridge.training.models import engine_layers

# A routed expert's parameter. Sequential layers: `experts.local_experts.3.linear_fc1.weight`; Transformer Engine's
# grouped layers: `experts.linear_fc1.weight3`, or `experts.linear_fc1.weight` for all experts of the rank
_EXPERT = re.compile(r"\bexperts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.(weight|bias)(\d*)$")
# Megatron-Core 0.16's own grouped layers: the transposed matrices of all experts of the rank
_TRANSPOSED = re.compile(r"\bexperts\.weight([12])$")

# Of the layers of Mamba and Gated DeltaNet
_DECAY = (1.0, 16.0)  # of the state, drawn evenly, kept as a logarithm
_STEP = (1e-3, 0.1)  # Mamba's time step, drawn evenly in its logarithm, kept as softplus takes it
_LEAST_STEP = 1e-4
_MAMBA_KERNEL = 4  # the width of its convolution, which Megatron-Core does not let choose

# A parameter of such a layer: the name of the layer's part, and the rows of each part on this rank
_MixerWeight = tuple[str, tuple[int, ...]]
# (name, shape of the shard, its dimension or -1, tensor-parallel size, rank) -> the shard
_Draw = Callable[[str, Sequence[int], int, int, int], torch.Tensor]


@torch.no_grad()
def initialize_weights(model: torch.nn.Module, config: Any, seed: int) -> None:
    """Fill every matrix of `model` with this rank's shard of its global value; norms and biases keep theirs.

    Mamba's and Gated DeltaNet's layers have random vectors as well. Modules on the meta device do this as soon as
    Megatron-FSDP has given them memory and calls their `reset_parameters`.
    """
    fill = partial(_fill, model=model, config=config, seed=seed, mixers=_mixer_weights(model))
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            fill(name, parameter)
    for prefix, module in model.named_modules():
        given = dict(module.named_parameters(prefix, recurse=False))
        if any(parameter.is_meta for parameter in given.values()):
            usual = getattr(module, "reset_parameters", None)
            module.reset_parameters = partial(_reset, module, prefix, given, usual, fill)


def _fill(name: str, parameter: Any, model: Any, config: Any, seed: int, mixers: dict[str, _MixerWeight]) -> None:
    if name not in mixers and (parameter.dim() < 2 or name.endswith(".bias")):
        return
    own = _globalize(name, model)
    # the same numbers on every device
    device = torch.device("cpu") if config.use_cpu_initialization else parameter.device
    if name in mixers:
        value = _mixer_value(own, mixers[name], parameter, config, seed, device)
    else:
        value = _value(own, parameter, config, partial(_draw, config=config, seed=seed, device=device))
    value = value.to(parameter.dtype)  # of FP8 the nominal one, from which every later step rounds, too
    parameter.copy_(value)
    # the optimizer's initial value: Transformer Engine keeps it next to an FP8 parameter
    read_kept = getattr(parameter, "get_high_precision_init_val", None)
    if read_kept is not None and (kept := read_kept()) is not None:
        kept.copy_(value)


def _reset(module: torch.nn.Module, prefix: str, given: dict[str, Any], usual: Any, fill: Any) -> None:
    """Fill parameters that have memory now; given: those on the meta device, with their marks.

    Transformer Engine's `reset_parameters` replaces parameters by quantized parameters, which have a backward pass's
    data only if gradients are enabled.
    """
    if usual is not None:
        usual()
    with torch.no_grad():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            vars(parameter).update(vars(given[name]))
            if usual is None:
                parameter.zero_()
            fill(name, parameter)


def mark_shards(model: torch.nn.Module) -> None:
    """Correct the marks of Transformer Engine's layers: which parameters are sharded, for their values and for norms.

    Megatron-Core before 0.19 leaves them out on experts, so norms count one of their shards; 0.16 marks replicas as
    shards, which would start from different values.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            marks: Any = parameter
            if found := _EXPERT.search(name):
                if mpu.get_expert_tensor_parallel_world_size() > 1 and (found[2], found[3]) != ("2", "bias"):
                    marks.tensor_model_parallel, marks.partition_stride = True, 1
                    marks.partition_dim = int(found[2]) - 1
            elif getattr(module, "parallel_mode", "") is None:  # a product that every rank holds in full
                marks.tensor_model_parallel = False


def _globalize(name: str, model: Any) -> str:
    """Return the name with the global number of its layer."""
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        number = model.decoder.layers[int(layer[1])].layer_number - 1
        rest = name[layer.end() :]
        rest, _ = engine_layers.PARAMETERS.get(rest.removeprefix(f"{engine_layers.INNER}."), (rest, 0))
        return f"decoder.layers.{number}.{rest}"
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"  # the copy of the tied embedding on the last stage
    return name


def _value(name: str, parameter: Any, config: Any, draw: _Draw) -> torch.Tensor:
    """Return this rank's share of the matrix with this global name; of grouped experts, all experts of this rank."""
    if found := _TRANSPOSED.search(name):
        experts = _experts_per_rank(config)
        # weight1 [hidden, experts x width], weight2 [experts x width, hidden]
        hidden = parameter.shape[int(found[1]) - 1]
        width = parameter.numel() // experts // hidden
        shape = (width, hidden) if found[1] == "1" else (hidden, width)
        matrices = _matrices(found, found[1], range(experts), shape, config, draw)
        return torch.stack([matrix.T for matrix in matrices]).reshape(parameter.shape)
    if found := _EXPERT.search(name):
        number = found[1] or found[4]
        numbers = [int(number)] if number else range(_experts_per_rank(config))
        matrices = _matrices(found, found[2], numbers, parameter.shape[-2:], config, draw)
        size = getattr(config, "moe_mlp_glu_interleave_size", None)
        if size is not None and found[1] is None and found[2] == "1" and config.gated_linear_unit:
            # grouped layers expect the rows of the gate and of the up projection in alternating blocks
            blocks = [matrix.view(2, -1, size, matrix.shape[-1]).transpose(0, 1) for matrix in matrices]
            matrices = [block.reshape(matrix.shape) for block, matrix in zip(blocks, matrices, strict=True)]
        return matrices[0] if number else torch.stack(matrices)
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    dim = int(parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else -1
    return draw(name, parameter.shape, dim, tp, rank)


def _matrices(
    name: re.Match[str], layer: str, numbers: Iterable[int], shape: Sequence[int], config: Any, draw: _Draw
) -> list[torch.Tensor]:
    """Return a layer's matrices of these experts of the rank, each seeded by its name in sequential layers."""
    first = mpu.get_expert_model_parallel_rank() * _experts_per_rank(config)
    tp, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    start = f"{name.string[: name.start()]}experts.local_experts."
    names = [f"{start}{first + number}.linear_fc{layer}.weight" for number in numbers]
    return [draw(each, shape, int(layer) - 1, tp, rank) for each in names]


def _experts_per_rank(config: Any) -> int:
    return int(config.num_moe_experts // config.expert_model_parallel_size)


def _draw(
    name: str, shape: Sequence[int], dim: int, tp: int, rank: int, *, config: Any, seed: int, device: torch.device
) -> torch.Tensor:
    """Draw a whole matrix and return this rank's shard of it, which has `shape`; dim: -1 if it is not sharded."""
    whole = [size * tp if i == dim else size for i, size in enumerate(shape)]
    generator = generator_of(name, seed, device)
    full = torch.empty(whole, device=device).normal_(0.0, _std(name, config), generator=generator)
    if dim < 0 or tp == 1:
        return full
    # Megatron shards gate and up projection separately, and stores them one after the other
    parts = full.chunk(2, dim) if config.gated_linear_unit and "linear_fc1" in name else [full]
    return torch.cat([part.chunk(tp, dim)[rank] for part in parts], dim)


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Return the generator of the parameter with this global name."""
    return torch.Generator(device).manual_seed((zlib.crc32(name.encode()) + seed) % 2**31)


def _std(name: str, config: Any) -> float:
    """Return the standard deviation of a matrix; smaller for matrices that add to the residual."""
    std = float(config.init_method_std)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")):
        std /= math.sqrt((1 if getattr(config, "is_hybrid_model", False) else 2) * config.num_layers)
    if getattr(config, "use_mup", False) and not name.startswith(("embedding.", "output_layer.")):
        std /= math.sqrt(config.mup_width_mult)
    return std


def _mixer_weights(model: torch.nn.Module) -> dict[str, _MixerWeight]:
    """Return the parameters of Mamba and Gated DeltaNet whose values or shares differ from other matrices, by name."""
    found: dict[str, _MixerWeight] = {}
    for name, module in model.named_modules():
        layer: Any = module
        if hasattr(layer, "in_proj") and hasattr(layer, "d_state"):  # z, x, B, C, dt
            inner, heads = layer.d_inner_local_tp, layer.nheads_local_tp
            states = layer.ngroups_local_tp * layer.d_state
            rows = {"in_proj.weight": (inner, inner, states, states, heads), "dt_bias": (heads,)}
            convolved = (inner, states, states)
        elif hasattr(layer, "in_proj") and hasattr(layer, "value_head_dim"):  # q, k, v, gate, beta, alpha
            tp = layer.tp_size
            keys, values, heads = layer.qk_dim // tp, layer.v_dim // tp, layer.num_value_heads // tp
            rows = {"in_proj.weight": (keys, keys, values, values, heads, heads)}
            convolved = (keys, keys, values)
        else:
            continue
        rows |= {"conv1d.weight": convolved, "conv1d.bias": convolved, "A_log": (heads,)}
        for each, _ in module.named_parameters():
            # Megatron-Core 0.19 has no module of Mamba's convolution
            if (leaf := each.replace("conv1d_", "conv1d.")) in rows:
                found[f"{name}.{each}"] = (leaf, rows[leaf])
    return found


def _mixer_value(
    name: str, mixer: _MixerWeight, parameter: torch.Tensor, config: Any, seed: int, device: torch.device
) -> torch.Tensor:
    leaf, rows = mixer
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    generator = generator_of(name.replace("conv1d_", "conv1d."), seed, device)
    full = torch.empty([parameter.shape[0] * tp, *parameter.shape[1:]], device=device)
    if leaf == "in_proj.weight":  # drawn as other matrices are
        full.normal_(0.0, _std(name, config), generator=generator)
    else:
        full.uniform_(generator=generator)
    if leaf == "A_log":
        full = torch.log(_DECAY[0] + full * (_DECAY[1] - _DECAY[0]))
    elif leaf == "dt_bias":
        low, high = map(math.log, _STEP)
        step = torch.exp(low + full * (high - low)).clamp(min=_LEAST_STEP)
        full = step + torch.log(-torch.expm1(-step))
    elif leaf != "in_proj.weight":  # as torch's convolution
        kernel = config.linear_conv_kernel_dim if ".self_attention." in name else _MAMBA_KERNEL
        full = (2 * full - 1) / math.sqrt(kernel)
    parts = torch.split(full, [size * tp for size in rows])
    return torch.cat([part.chunk(tp)[rank] for part in parts])
