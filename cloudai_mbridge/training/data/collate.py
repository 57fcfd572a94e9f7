"""Conversion of the samples of a request to the tensors of one batch."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Rows = list[dict[str, Any]]
_UNIT = 16  # tokens; lengths are rounded up to it, so that kernels get few and even shapes


def stack(rows: Rows, whole: list[int]) -> dict[str, torch.Tensor]:
    """Stack samples of one length: every tensor that they hold, [rows, ...]."""
    names = [name for name, value in rows[0].items() if isinstance(value, torch.Tensor)]
    return {name: torch.stack([row[name] for row in rows]) for name in names}


def length_unit(tp: int, cp: int) -> int:
    """Return the number that must divide a sequence length: tensor parallelism splits each context-parallel half."""
    return tp * (2 * cp if cp > 1 else 1)


@dataclass(frozen=True)
class Pad:
    """Pad samples of different lengths, all in tokens, [rows, length].

    lengths: of every sample of the dataset; None pads to `limit`. With them, the length is that of the longest sample
    of the whole global batch, rounded up, so that all ranks agree on it.
    """

    lengths: np.ndarray | None
    limit: int
    unit: int
    pad_id: int

    def __call__(self, rows: Rows, whole: list[int]) -> dict[str, torch.Tensor]:
        """Pad the rows; padding has no loss."""
        length = self.limit
        if self.lengths is not None:
            unit = math.lcm(_UNIT, self.unit)
            length = min(-(-int(self.lengths[whole].max()) // unit) * unit, self.limit)
        return {
            "tokens": self._fill([row["tokens"] for row in rows], length, self.pad_id),
            "labels": self._fill([row["labels"] for row in rows], length, self.pad_id),
            "loss_mask": self._fill([row["loss_mask"] for row in rows], length, 0).float(),
            "position_ids": torch.arange(length).repeat(len(rows), 1),
        }

    @staticmethod
    def _fill(values: list[np.ndarray], length: int, filler: int) -> torch.Tensor:
        filled = np.full((len(values), length), filler, dtype=np.int64)
        for row, value in zip(filled, values, strict=True):
            row[: len(value)] = value
        return torch.from_numpy(filled)


@dataclass(frozen=True)
class StackPacked:
    """Stack packed sequences, [rows, packed size], and their boundaries, int32 [rows, boundaries].

    boundaries: pad each row's boundaries to that many with its last one, as CUDA graphs need; None: to the longest row.
    After them comes at least one -1, the first at `cu_seqlens_argmin` [rows, 1]. `max_seqlen` [rows, 1] is in tokens;
    longest: report this instead of each row's own.
    """

    boundaries: int | None = None
    longest: int | None = None

    def __call__(self, rows: Rows, whole: list[int]) -> dict[str, torch.Tensor]:
        bounds = [row["cu_seqlens"] for row in rows]
        if self.boundaries is not None:
            bounds = [np.pad(each, (0, self.boundaries - len(each)), mode="edge") for each in bounds]
        width = max(len(each) for each in bounds) + 1
        padded = np.full((len(rows), width), -1, dtype=np.int32)
        for row, each in zip(padded, bounds, strict=True):
            row[: len(each)] = each
        longest = [self.longest or int(np.diff(each).max()) for each in bounds]
        return {
            **stack(rows, whole),
            "cu_seqlens": torch.from_numpy(padded),
            "cu_seqlens_argmin": torch.tensor([[len(each)] for each in bounds], dtype=torch.int32),
            "max_seqlen": torch.tensor([[each] for each in longest], dtype=torch.int32),
        }
