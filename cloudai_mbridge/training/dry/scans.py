"""Scans and short convolutions of state-space layers on the meta device: shapes, and what their kernels keep.

They are in Triton and CUDA, of mamba_ssm, causal_conv1d and fla (flash-linear-attention). Their FLOPs are not counted.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

Maybe = torch.Tensor | None
_CHUNK = 64  # of the gated delta rule


class _Kernel(torch.autograd.Function):
    """A kernel that keeps its operands and more for the backward pass, and makes a gradient of every operand."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], more: Sequence[torch.Tensor], *operands: Maybe) -> torch.Tensor:
        ctx.save_for_backward(*operands, *more)
        ctx.num_operands = len(operands)
        first = operands[0]
        assert first is not None
        return first.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        operands = ctx.saved_tensors[: ctx.num_operands]
        return None, None, *(None if each is None else torch.empty_like(each) for each in operands)


def _kernel(shape: Sequence[int], more: Sequence[torch.Tensor], *operands: Maybe) -> torch.Tensor:
    return _Kernel.apply(shape, more, *operands)  # type: ignore[no-untyped-call, no-any-return]


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: Maybe,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    chunk_size: int,
    headdim: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return [batch, length, heads x head size]; the output before its gate is kept, the convolution is not."""
    inner = dt_bias.numel() * (headdim or D.size(-1))
    shape = (*zxbcdt.shape[:2], inner)
    return _kernel(shape, [zxbcdt.new_empty(shape)], zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: Maybe = None,  # noqa: N803
    z: Maybe = None,
    dt_bias: Maybe = None,
    **options: Any,
) -> torch.Tensor:
    """Return a tensor like x, [batch, length, heads, head size]; the output and the sums of decays are kept."""
    decays = dt.new_empty(dt.shape, dtype=torch.float32)
    return _kernel(x.shape, [x.new_empty(x.shape), decays], x, dt, A, B, C, D, z, dt_bias)


def causal_conv1d_fn(x: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, **options: Any) -> torch.Tensor:
    """Return a tensor like x, [batch, channels, length]."""
    return _kernel(x.shape, [], x, weight, bias)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Return a tensor like x, [batch, length, channels], and no state."""
    return _kernel(x.shape, [], x, weight, bias), None


def l2norm(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return a tensor like x; the reciprocal norms are kept."""
    return _kernel(x.shape, [x.new_empty(x.shape[:-1], dtype=torch.float32)], x)


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, None]:
    """Return a tensor like v, [batch, length, heads, head size], and no state; a chunk's matrices are kept."""
    return _kernel(v.shape, [k.new_empty((*v.shape[:-1], _CHUNK))], q, k, v, g, beta), None


_FUNCTIONS = {
    each.__name__: each
    for each in (
        *(mamba_split_conv1d_scan_combined, mamba_chunk_scan_combined, causal_conv1d_fn),
        *(causal_conv1d, l2norm, chunk_gated_delta_rule),
    )
}


def install() -> None:
    """Replace the functions in Megatron-Core, for the packages that are there."""
    if find_spec("mamba_ssm") is not None:
        import megatron.core.ssm.mamba_mixer
    if find_spec("fla") is not None and find_spec("megatron.core.ssm.gated_delta_net") is not None:
        import megatron.core.ssm.gated_delta_net  # noqa: F401
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.ssm.") and module is not None:
            for function, own in _FUNCTIONS.items():
                if getattr(module, function, None) is not None:
                    setattr(module, function, own)
