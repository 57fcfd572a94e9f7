"""Emulation of Transformer Engine's normalization kernels: LayerNorm and RMSNorm, forward and backward, in fp32."""

from typing import Any

import torch

from tests.transformer_engine.emulation.formats import high_precision, torch_dtype
from tests.transformer_engine.emulation.quantize import store

# Argument of both: the multiprocessors that the kernel leaves to others
Margin = int


def layernorm_fwd(input: Any, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *others: Any) -> list[Any]:
    """Return the normalized rows, in the quantizer's format, with the mean and the inverse deviation of each.

    others: as of `_stored`, in its order.
    """
    rows = high_precision(input).flatten(0, -2)
    mean = rows.mean(-1)
    inverse = torch.rsqrt((rows - mean[:, None]).square().mean(-1) + eps)
    normalized = (rows - mean[:, None]) * inverse[:, None]
    return [_stored(normalized, input, weight, bias, *others), mean, inverse]


def rmsnorm_fwd(input: Any, weight: torch.Tensor, eps: float, *others: Any) -> list[Any]:
    """Return the normalized rows, in the quantizer's format, None, and the inverse root mean square of each."""
    rows = high_precision(input).flatten(0, -2)
    inverse = torch.rsqrt(rows.square().mean(-1) + eps)
    return [_stored(rows * inverse[:, None], input, weight, None, *others), None, inverse]


def _stored(
    normalized: torch.Tensor,
    input: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: Margin,
    zero_centered_gamma: bool,
) -> Any:
    made = normalized * _gamma(weight, zero_centered_gamma)
    made = made if bias is None else made + bias.float()
    return store(made.view(input.shape).to(torch_dtype(otype)), quantizer, ln_out)


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: Margin,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the input, gamma and beta."""
    normalized = (x.float().flatten(0, -2) - mu[:, None]) * rsigma[:, None]
    gradient = dz.float().reshape(normalized.shape)
    inner = gradient * _gamma(gamma, zero_centered_gamma)
    centered = inner - inner.mean(-1, keepdim=True)
    dx = (centered - normalized * (inner * normalized).mean(-1, keepdim=True)) * rsigma[:, None]
    made = dx.view(x.shape), (gradient * normalized).sum(0), gradient.sum(0)
    return [made[0].to(x.dtype), made[1].to(gamma.dtype), made[2].to(gamma.dtype)]


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: Margin,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the input and gamma."""
    return rmsnorm_bwd_add(dz, x, torch.zeros_like(x), rsigma, gamma, sm_margin, zero_centered_gamma)


def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: Margin,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradient of the input plus `add`, and that of gamma."""
    normalized = x.float().flatten(0, -2) * rsigma[:, None]
    gradient = dz.float().reshape(normalized.shape)
    inner = gradient * _gamma(gamma, zero_centered_gamma)
    dx = (inner - normalized * (inner * normalized).mean(-1, keepdim=True)) * rsigma[:, None]
    return [(dx.view(x.shape) + add.float()).to(x.dtype), (gradient * normalized).sum(0).to(gamma.dtype)]


def _gamma(weight: torch.Tensor, is_zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if is_zero_centered else weight.float()
