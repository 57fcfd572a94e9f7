"""Megatron-Bridge's name for the bounds of packed sequences as Megatron-Core's attention takes them."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def get_packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams:
    """Return the parameters of a packed batch.

    batch: `cu_seqlens`, and where known `max_seqlen`, `cu_seqlens_unpadded`, and for either the number of its entries
    under `..._argmin`; without that it ends before its first -1.
    """
    padded = _bounds(batch, "cu_seqlens")
    real = _bounds(batch, "cu_seqlens_unpadded")
    longest = batch.get("max_seqlen")
    longest = longest.squeeze() if torch.is_tensor(longest) else longest
    bounds = padded if real is None else real
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=None if real is None else padded,
        cu_seqlens_kv_padded=None if real is None else padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _bounds(batch: dict[str, Any], name: str) -> torch.Tensor | None:
    values: torch.Tensor | None = batch.get(name)
    if values is None:
        return None
    values = values.squeeze()
    end = batch.get(f"{name}_argmin")
    return values[values >= 0] if end is None else values[: int(end)]


__all__ = ["get_packed_seq_params"]
