"""Initialization of Mamba's and Gated DeltaNet's layers: their own distributions, and the parts that are split
over tensor-parallel ranks."""

import math
from typing import Any, NamedTuple

import torch

_DECAY = (1.0, 16.0)  # of the state, drawn evenly, kept as a logarithm
_STEP = (1e-3, 0.1)  # Mamba's time step, drawn evenly in its logarithm, kept as softplus takes it
_LEAST_STEP = 1e-4


class MixerWeight(NamedTuple):
    """A parameter of such a layer: the name of the layer's part, and the rows of each part on this rank."""

    leaf: str
    rows: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether it is drawn as other matrices are."""
        return self.leaf == "in_proj.weight"


def mixer_weights(model: torch.nn.Module) -> dict[str, MixerWeight]:
    """Return the parameters whose values or shares differ from other matrices, by name."""
    found: dict[str, MixerWeight] = {}
    for name, module in model.named_modules():
        if (parts := _parts(module)) is None:
            continue
        projected, convolved, heads, has_steps = parts
        # Megatron-Core 0.19 has no module of Mamba's convolution
        rows = {"in_proj.weight": projected, "conv1d.weight": convolved, "conv1d.bias": convolved, "A_log": (heads,)}
        if has_steps:
            rows["dt_bias"] = (heads,)
        for each, _ in module.named_parameters():
            if (leaf := each.replace("conv1d_", "conv1d.")) in rows:
                found[f"{name}.{each}"] = MixerWeight(leaf, rows[leaf])
    return found


def _parts(module: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, bool] | None:
    """Return the rows of the projection's and of the convolution's parts, the heads, and if time steps are drawn."""
    if hasattr(module, "in_proj") and hasattr(module, "d_state"):  # z, x, B, C, dt
        inner, states, heads = module.d_inner_local_tp, module.ngroups_local_tp * module.d_state, module.nheads_local_tp
        return (inner, inner, states, states, heads), (inner, states, states), heads, True
    if hasattr(module, "in_proj") and hasattr(module, "value_head_dim"):  # q, k, v, gate, beta, alpha
        tp = module.tp_size
        keys, values, heads = module.qk_dim // tp, module.v_dim // tp, module.num_value_heads // tp
        return (keys, keys, values, values, heads, heads), (keys, keys, values), heads, False
    return None


def of_mixer(leaf: str, drawn: torch.Tensor, kernel: int) -> torch.Tensor:
    """Turn numbers drawn evenly from 0 to 1 into the values of a parameter. kernel: width of the convolution."""
    if leaf == "A_log":
        return torch.log(_DECAY[0] + drawn * (_DECAY[1] - _DECAY[0]))
    if leaf == "dt_bias":
        low, high = map(math.log, _STEP)
        step = torch.exp(low + drawn * (high - low)).clamp(min=_LEAST_STEP)
        return step + torch.log(-torch.expm1(-step))
    return (2 * drawn - 1) / math.sqrt(kernel)  # as torch's convolution
