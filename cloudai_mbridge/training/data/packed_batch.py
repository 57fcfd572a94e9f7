"""Several sequences packed into one row: their bounds, and their split by context parallelism."""

from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams

# Whether Megatron-Core numbers the sequence of each token, where Mamba's state begins anew: since 0.17
NUMBERS_TOKENS = any(each.name == "total_tokens" for each in fields(PackedSeqParams))
_BOUNDS = ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens")
FIXED = "bounds_are_fixed"  # key of a micro-batch whose bounds and longest sequence need no look at their values


def sequence_bounds(rows: dict[str, Any]) -> torch.Tensor | None:
    """Return the bounds [0, end of the first sequence, ...] of a packed micro-batch as int32; None if it is not packed.

    rows: `cu_seqlens` [1, n] or [n], padded with -1 from index `cu_seqlens_argmin` on, or without that index with the
    row's length, as Megatron-Core's documents are; or `cu_seqlens_q_padded`, else `cu_seqlens_q`, in its place. Tokens
    behind the last bound become a sequence of their own, so that no token is left without attention.

    Raises ValueError: more than one row, or bounds that do not ascend from 0 within the row.
    """
    name = next((name for name in _BOUNDS if rows.get(name) is not None), None)
    if name is None or rows.get(FIXED):
        return rows.get("cu_seqlens")
    padded, length = rows[name], int(rows["tokens"].size(1))
    if rows["tokens"].size(0) != 1 or padded.numel() != padded.size(-1):
        raise ValueError(f"packed sequences need micro_batch_size = 1, not {rows['tokens'].size(0)} rows")
    end = rows.get(f"{name}_argmin")
    bounds = padded.reshape(-1) if end is None else padded.reshape(-1)[: int(end)]
    bounds = bounds[bounds >= 0].to(torch.int32)
    bounds = bounds[: int((bounds < length).sum()) + 1] if end is None else bounds
    if not bounds.numel() or bounds[0] != 0 or bool((bounds.diff() < 0).any()) or bounds[-1] > length:
        raise ValueError(f"cu_seqlens {padded.tolist()} are not bounds of sequences in {length} tokens")
    return bounds if bounds[-1] == length else torch.cat([bounds, bounds.new_tensor([length])])


def sequence_lengths(rows: dict[str, Any]) -> torch.Tensor | None:
    """Return the lengths of the sequences of a packed micro-batch, without marked padding; None if it is not packed.

    rows: as of `sequence_bounds`, and for sequences with padding the bounds without it: `cu_seqlens_unpadded`, or
    `cu_seqlens_q` beside `cu_seqlens_q_padded`.
    """
    bounds = sequence_bounds(rows)
    real = rows.get("cu_seqlens_unpadded" if rows.get("cu_seqlens_q") is None else "cu_seqlens_q")
    if bounds is None or real is None:
        return None if bounds is None else bounds.diff()
    ends: torch.Tensor = real.reshape(-1)
    return ends[ends >= 0].diff().clamp(min=0)


def with_fixed_bounds(rows: dict[str, Any]) -> dict[str, Any]:
    """Return a micro-batch whose bounds have one shape in every step, and no index of their end: for a CUDA graph.

    rows: as of `sequence_bounds`, from a data set that pads its bounds to one number; others are returned as they are.
    The longest sequence is taken to be the whole row, which is true of every step.
    """
    if rows.get("cu_seqlens") is None:
        return rows
    sequence_bounds(rows)  # which checks them
    bounds, length = rows["cu_seqlens"].reshape(-1), int(rows["tokens"].size(1))
    fixed = torch.cat([torch.where(bounds < 0, length, bounds), bounds.new_tensor([length])]).to(torch.int32)
    return {**rows, "cu_seqlens": fixed, "cu_seqlens_argmin": None, "max_seqlen": length, FIXED: True}


def longest_sequence(rows: dict[str, Any], bounds: torch.Tensor) -> int:
    """Return the tokens of the longest sequence, or `max_seqlen` as the data set gives it, if that is larger."""
    claimed = rows.get("max_seqlen")
    if rows.get(FIXED):
        return int(rows["max_seqlen"])
    return max(int(bounds.diff().max()), 0 if claimed is None else int(claimed))


def packed_on_this_cp_rank(tensors: dict[str, torch.Tensor], bounds: torch.Tensor) -> dict[str, torch.Tensor]:
    """Take this context-parallel rank's share of every sequence: chunks r and 2*cp-1-r of its 2*cp equal chunks.

    Raises ValueError: a sequence cannot be cut into 2*cp equal chunks.
    """
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return tensors
    index = zigzag_index(bounds, size, rank)
    return {key: value.index_select(1, index) for key, value in tensors.items()}


def zigzag_index(bounds: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return the positions of a packed row that context-parallel rank `rank` of `size` holds, sequence by sequence."""
    lengths = bounds.diff().tolist()
    if odd := [length for length in lengths if length % (2 * size)]:
        raise ValueError(
            f"packed sequences of {odd[:5]} tokens cannot be shared by context_parallel_size = {size}:"
            f" each length has to be a multiple of {2 * size}; set dataset.packed_sequence_specs.pad_seq_to_mult"
        )
    shares = []
    for start, length in zip(bounds.tolist(), lengths, strict=False):
        chunk = length // (2 * size)
        for part in (rank, 2 * size - 1 - rank):
            shares.append(torch.arange(start + part * chunk, start + (part + 1) * chunk))
    return torch.cat(shares)


def get_packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams:
    """Return the parameters of a packed batch as Megatron-Core's attention takes them.

    batch: `cu_seqlens`, and if available `max_seqlen`, `cu_seqlens_unpadded`, and for either the number of its entries
    under `..._argmin`; without that it ends before its first -1. Or the parameters under their own names:
    `cu_seqlens_q`, `cu_seqlens_q_padded`, `max_seqlen_q`, and the same for `kv`. total_tokens: of the row; Mamba layers
    get the sequence of each token then, if Megatron-Core has it (0.17).
    """
    given: dict[str, Any] = {"qkv_format": "thd"}
    if NUMBERS_TOKENS:
        given["total_tokens"] = batch.get("total_tokens")
    if batch.get("cu_seqlens_q") is not None:
        for name in (f"cu_seqlens_{kind}{end}" for kind in ("q", "kv") for end in ("", "_padded")):
            given[name] = _bounds_of(batch, name)
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            value = batch.get(name)
            given[name] = int(value) if torch.is_tensor(value) else value
        return PackedSeqParams(**given)
    padded = _bounds_of(batch, "cu_seqlens")
    real = _bounds_of(batch, "cu_seqlens_unpadded")
    longest = batch.get("max_seqlen")
    longest = longest.squeeze() if torch.is_tensor(longest) else longest
    bounds = padded if real is None else real
    return PackedSeqParams(
        **given,
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=None if real is None else padded,
        cu_seqlens_kv_padded=None if real is None else padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _bounds_of(batch: dict[str, Any], name: str) -> torch.Tensor | None:
    values: torch.Tensor | None = batch.get(name)
    if values is None:
        return None
    values = values.squeeze()
    end = batch.get(f"{name}_argmin")
    return values[values >= 0] if end is None else values[: int(end)]
