"""Emulation of Transformer Engine's multi-tensor kernels: norms, scaling, Adam in its forms, FP8 scales from amax."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.transformer_engine.emulation.formats import MAX, encode_e8m0, scale_of, to_fp8

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_l2norm(
    chunk_size: int, noop: torch.Tensor, lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors together [1], and of each if wanted."""
    norms = torch.stack([each.float().norm() for each in lists[0]])
    return norms.norm().view(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop: torch.Tensor, lists: Lists, inv_scale: torch.Tensor, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of the tensors times `inv_scale`."""
    both = multi_tensor_l2norm(chunk_size, noop, lists, per_tensor)
    return both[0] * inv_scale, both[1] * inv_scale


def multi_tensor_scale(chunk_size: int, noop: torch.Tensor, lists: Lists, scale: float) -> None:
    """Write scale x lists[0] to lists[1]; set the flag where a value is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
        if not source.float().isfinite().all():
            noop.fill_(1)


def multi_tensor_scale_tensor(chunk_size: int, noop: torch.Tensor, lists: Lists, scale: torch.Tensor) -> None:
    """Do what `multi_tensor_scale` does, with the factor in a tensor."""
    multi_tensor_scale(chunk_size, noop, lists, float(scale))


def multi_tensor_adam(chunk_size: int, noop: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """Update moments and parameters: lists of gradients, parameters, first and second moments, master parameters.

    settings: as of `_adam`, in its order.
    """
    for gradient, parameter, m, v, *master in zip(*lists, strict=True):
        full = master[0] if master else parameter
        value = _adam(gradient, full.float(), m, v, *settings)
        full.copy_(value)
        parameter.copy_(value)


def multi_tensor_adam_param_remainder(chunk_size: int, noop: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """Update parameters in bf16 whose fp32 values have their lower 16 bits beside them, in int16."""
    for gradient, parameter, m, v, remainder in zip(*lists, strict=True):
        high, low = parameter.view(torch.int16).int(), remainder.int()
        bits = (high - (low < 0).int() << 16) | (low & 0xFFFF)
        value = _adam(gradient, bits.view(torch.float32), m, v, *settings)
        bits = value.contiguous().view(torch.int32)
        low = (bits << 16) >> 16
        parameter.view(torch.int16).copy_((bits >> 16) + (low < 0).int())
        remainder.copy_(low)


def multi_tensor_adam_fp8(chunk_size: int, noop: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """Update fp32 master parameters, and write them to FP8 with the scale of delayed scaling.

    settings: as of `_adam`, then the FP8 type.
    """
    *settings_of_adam, fp8_dtype = settings
    for gradient, parameter, m, v, master, scale, amax, scale_inv in zip(*lists, strict=True):
        assert master.dtype == torch.float32, "as the kernel"
        value = _adam(gradient, master, m, v, *settings_of_adam)
        master.copy_(value)
        amax.copy_(torch.maximum(amax, value.abs().max()))
        scale_inv.copy_(scale.reciprocal())
        parameter.copy_(to_fp8(value * scale, fp8_dtype))


def _adam(
    gradient: torch.Tensor,
    value: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> torch.Tensor:
    """Return the new value in fp32 and update the moments; mode 0: L2, 1: decoupled weight decay."""
    gradient = gradient.float() + (weight_decay * value if mode == 0 else 0)
    first = beta1 * m.float() + (1 - beta1) * gradient
    second = beta2 * v.float() + (1 - beta2) * gradient * gradient
    m.copy_(first)
    v.copy_(second)
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    update = first / corrections[0] / ((second / corrections[1]).sqrt() + eps)
    return value - lr * (update + (weight_decay * value if mode == 1 else 0))


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude."""
    amax.copy_(input.float().abs().max())


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop: torch.Tensor, lists: Lists, max_fp8: float, force_pow_2_scales: bool, epsilon: float
) -> None:
    """Write scales and their inverses from amaxes: lists of amax, scale, inverse."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, max_fp8, force_pow_2_scales, epsilon))
        scale_inv.copy_(scale.reciprocal())


def multi_tensor_compute_scale_inv_e8m0(chunk_size: int, dummy: None, lists: Lists) -> None:
    """Write MXFP8's inverse scales from amaxes in bf16."""
    for amax, scale_inv in zip(*lists, strict=True):
        scale_inv.copy_(encode_e8m0(amax.float() / MAX["kFloat8E4M3"]))


def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor,
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    algorithm: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Roll each amax history [length, tensors], and take the scale of delayed scaling from it.

    reduced: this step's amaxes of all tensors, one after the other; a zero: take the one in the history's first row.
    """
    newest = reduced.split([scale.numel() for scale in scales])
    for amax, history, scale in zip(newest, histories, scales, strict=True):
        latest = torch.where(amax != 0, amax, history[0])
        rolled = torch.cat((history[1:], latest[None]))
        largest = rolled.max(0).values if algorithm == "max" else latest
        largest = torch.where(latest != 0, largest, latest)
        history.copy_(torch.where(latest != 0, torch.cat((torch.zeros_like(rolled[:1]), rolled[1:])), history))
        new = MAX[fp8_dtype.name] * 2.0**-margin / largest
        new = new.clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where((largest > 0) & largest.isfinite(), new, scale))
