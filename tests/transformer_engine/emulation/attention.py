"""Emulation of Transformer Engine's kernels for unfused attention: scaled softmax, masked or causal, and fused rope."""

from typing import Any

import torch

_MASKED = -10000.0  # the kernels' value; a row in which all are masked becomes zero


def scaled_softmax_forward(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    """Return softmax(scale x inputs)."""
    return torch.softmax(inputs.float() * scale, -1).to(inputs.dtype)


def scaled_masked_softmax_forward(inputs: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the softmax without the positions where the mask is True."""
    mask = mask.bool()
    scores = (inputs.float() * scale).masked_fill(mask, _MASKED)
    return torch.softmax(scores, -1).masked_fill(mask.all(-1, keepdim=True), 0.0).to(inputs.dtype)


def scaled_aligned_causal_masked_softmax_forward(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the causal softmax; the last query sees all keys."""
    queries, keys = inputs.shape[-2:]
    mask = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.softmax((inputs.float() * scale).masked_fill(mask, -torch.inf), -1).to(inputs.dtype)


def scaled_softmax_backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the gradient of the scores."""
    gradient, softmax = output_grads.float(), softmax_results.float()
    made = softmax * (gradient - (gradient * softmax).sum(-1, keepdim=True)) * scale
    return made.to(output_grads.dtype)


scaled_upper_triang_masked_softmax_forward = scaled_aligned_causal_masked_softmax_forward
scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


def fused_rope_forward(input: torch.Tensor, *rope: Any) -> torch.Tensor:
    """Return the input rotated: [s, b, h, d] or [b, s, h, d]. rope: as of `_angles`, in its order."""
    return _rotate(input, *_angles(input, *rope))


def fused_rope_backward(output_grads: torch.Tensor, *rope: Any) -> torch.Tensor:
    """Return the gradient: rotated the other way."""
    cos, sin, interleaved = _angles(output_grads, *rope)
    return _rotate(output_grads, cos, -sin, interleaved)


def _angles(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return cosines and sines by position, without packed sequences or context parallelism, and `interleaved`."""
    is_plain = start_positions is None and cu_seqlens is None and cp_size == 1
    assert is_plain, "not emulated"
    assert qkv_format.name in ("NVTE_SBHD", "NVTE_BSHD"), "not emulated"
    by_position = freqs[: input.shape[0 if qkv_format.name == "NVTE_SBHD" else 1]]  # [s, 1, 1, d]
    if qkv_format.name == "NVTE_BSHD":
        by_position = by_position.transpose(0, 1)
    return by_position.float().cos(), by_position.float().sin(), interleaved


def _rotate(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotated, rest = input.float().split([cos.shape[-1], input.shape[-1] - cos.shape[-1]], -1)
    if interleaved:
        pairs = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        pairs = torch.cat((-second, first), -1)
    return torch.cat((rotated * cos + pairs * sin, rest), -1).to(input.dtype)
