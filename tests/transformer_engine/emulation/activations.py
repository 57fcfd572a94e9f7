"""Emulation of Transformer Engine's activation kernels: plain and gated ones, forward and backward, in fp32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import relu as torch_relu
from torch.nn.functional import silu as torch_silu

from tests.transformer_engine.emulation.quantize import store

Function = Callable[[torch.Tensor], torch.Tensor]

PLAIN: dict[str, Function] = {
    "gelu": partial(torch_gelu, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch_relu,
    "srelu": lambda x: torch_relu(x).square(),
    "silu": torch_silu,
}
# Gated: the first half of the last dimension through the function, times the second half
GATED: dict[str, Function] = {
    "glu": torch.sigmoid,
    "geglu": PLAIN["gelu"],
    "qgeglu": PLAIN["qgelu"],
    "reglu": torch_relu,
    "sreglu": PLAIN["srelu"],
    "swiglu": torch_silu,
}


def functions() -> dict[str, Callable[..., Any]]:
    """Return name in Transformer Engine's extension -> function."""
    made: dict[str, Callable[..., Any]] = {}
    for name, function in (PLAIN | {name: partial(_gated, function) for name, function in GATED.items()}).items():
        made[name] = partial(_forward, function)
        made[f"d{name}"] = partial(_backward, function)
        if name in PLAIN:
            made[f"dbias_d{name}"] = partial(_backward_with_bias, function)
    return made | {
        "clamped_swiglu": clamped_swiglu,
        "clamped_dswiglu": clamped_dswiglu,
        "scaled_swiglu": scaled_swiglu,
        "scaled_dswiglu": scaled_dswiglu,
        "bgrad_quantize": bgrad_quantize,
    }


def clamped_swiglu(
    input: torch.Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Any:
    """Return gpt-oss's gated activation: both halves clamped, the second one shifted."""
    return _forward(partial(_clamped, limit, alpha, glu_linear_offset), input, quantizer)


def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Return the gradient of `clamped_swiglu`'s input."""
    return _backward(partial(_clamped, limit, alpha, glu_linear_offset), grad, fwd_input, quantizer)


def scaled_swiglu(input: torch.Tensor, scales: torch.Tensor, quantizer: Any, glu_interleave_size: int) -> Any:
    """Return SwiGLU times a scale per row [rows]; gate and linear part by turns in blocks of this size, 0: halves."""
    return store((_interleaved(glu_interleave_size, input.float()) * scales[:, None]).to(input.dtype), quantizer)


def scaled_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    scales: torch.Tensor,
    quantizer: Any,
    glu_interleave_size: int,
    compute_scale_grad: bool,
) -> tuple[Any, torch.Tensor | None]:
    """Return the gradients of `scaled_swiglu`'s input, and of its scales if they are wanted."""
    function = partial(_interleaved, glu_interleave_size)
    made = _gradient(function, grad.float() * scales[:, None], fwd_input)
    products = grad.float() * function(fwd_input.float()) if compute_scale_grad else None
    return store(made, quantizer), None if products is None else products.sum(-1).to(scales.dtype)


def _interleaved(size: int, x: torch.Tensor) -> torch.Tensor:
    blocks = x.unflatten(-1, (-1, 2, size)).transpose(-2, -3).flatten(-3) if size else x
    return _gated(torch_silu, blocks)


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and the gradient in the quantizer's format."""
    return [input.flatten(0, -2).float().sum(0).to(input.dtype), store(input, quantizer)]


def _gated(function: Function, x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, -1)
    return function(gate) * linear


def _clamped(limit: float, alpha: float, offset: float, x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, -1)
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + offset)


def _forward(function: Function, input: torch.Tensor, quantizer: Any) -> Any:
    return store(function(input.float()).to(input.dtype), quantizer)


def _backward(function: Function, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    return store(_gradient(function, grad, fwd_input), quantizer)


def _backward_with_bias(function: Function, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
    gradient = _gradient(function, grad, fwd_input)
    return bgrad_quantize(gradient, quantizer)


def _gradient(function: Function, grad: torch.Tensor, fwd_input: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = fwd_input.detach().float().requires_grad_()
        (made,) = torch.autograd.grad(function(leaf), leaf, grad.float().reshape(function(leaf).shape))
    return made.to(fwd_input.dtype)
