"""The core of attention on the meta device: what a fused kernel keeps for the backward pass, and what it computes."""

from typing import Any

import torch


class _Core(torch.autograd.Function):
    """Causal attention that keeps query, key, value, output and the sums of the softmax, as fused kernels do."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: float, note: Any
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        # torch's kernels write [batch, length, heads, dimension], which is what is asked for next
        out = query.new_empty((length, batch, heads, value.size(-1))).permute(1, 2, 0, 3)
        ctx.save_for_backward(query, key, value, out, query.new_empty((batch, heads, length), dtype=torch.float32))
        ctx.flops = int(2 * batch * heads * length * key.size(2) * (query.size(-1) + value.size(-1)) * share)
        ctx.note = note
        note(ctx.flops)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.note(2 * ctx.flops)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def stand_in(note: Any, share: float = 0.5) -> Any:
    """Return a function in place of `scaled_dot_product_attention`.

    note: is given the FLOPs of each pass. share: of all pairs of query and key that are computed; causal: half.
    """

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        return _Core.apply(query, key, value, share, note)  # type: ignore[no-untyped-call, no-any-return]

    return attention
