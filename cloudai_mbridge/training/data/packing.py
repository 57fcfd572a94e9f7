"""Several samples in one sequence: first-fit packing, and its file: one int32 array [sequences, 4, size] of tokens,
labels, loss mask and position ids, which begin again at 0 with every sample and so mark the boundaries."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cloudai_mbridge.training.data.conversations import Sample
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.atomic import write_file

_TOKENS, _LABELS, _LOSS_MASK, _POSITION_IDS = range(4)


@dataclass(frozen=True)
class PackOptions:
    """size: tokens of a packed sequence; unit: each sample is padded to a multiple of it."""

    size: int
    unit: int = 1
    pad_id: int = 0
    seed: int = 1234


class PackedDataset:
    """Packed sequences, [size] each, with their boundaries."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sequence; `cu_seqlens` begins with 0, ends with the size and has a bound per sample.

        The sequence of a negative index has no loss: it fills up a batch.
        """
        row = np.array(self.rows[index])
        if index < 0:
            row[_LOSS_MASK] = 0
        return {
            "tokens": torch.from_numpy(row[_TOKENS]).long(),
            "labels": torch.from_numpy(row[_LABELS]).long(),
            "loss_mask": torch.from_numpy(row[_LOSS_MASK]).float(),
            "position_ids": torch.from_numpy(row[_POSITION_IDS]).long(),
            "cu_seqlens": _bounds(row),
        }

    @cached_property
    def max_boundaries(self) -> int:
        """The most boundaries that a sequence has."""
        return max(len(_bounds(row)) for row in self.rows)

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest sample, padding included."""
        return max(int(np.diff(_bounds(row)).max()) for row in self.rows)


def sequence_unit(pad_seq_to_mult: int | None, cp: int) -> int:
    """Return the number that must divide each packed sample's length: context parallelism halves every one."""
    return math.lcm(pad_seq_to_mult or 1, 2 * cp if cp > 1 else 1)


def first_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Put each item into the first bin that has room for it; return the items of every bin, in order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        place = next((i for i, free in enumerate(room) if free >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(size)
        bins[place].append(item)
        room[place] -= length
    return bins


def pack(samples: list[Sample], options: PackOptions) -> np.ndarray:
    """Pack the samples in an order drawn from the seed; return int32 [sequences, 4, size].

    The rest of a sequence is another, empty sample without loss.
    """
    order = np.random.default_rng(options.seed).permutation(len(samples))
    drawn = [samples[index] for index in order]
    lengths = [_padded(len(each.ids) - 1, options) for each in drawn]
    bins = first_fit(lengths, options.size)
    rows = np.zeros((len(bins), 4, options.size), dtype=np.int32)
    rows[:, [_TOKENS, _LABELS]] = options.pad_id
    for row, items in zip(rows, bins, strict=True):
        start = 0
        for item in items:
            sample, end = drawn[item], start + lengths[item]
            stop = start + len(sample.ids) - 1
            row[_TOKENS, start:stop] = sample.ids[:-1]
            row[_LABELS, start:stop] = sample.ids[1:]
            row[_LOSS_MASK, start:stop] = sample.learned[1:]
            row[_POSITION_IDS, start:end] = np.arange(end - start)
            start = end
        row[_POSITION_IDS, start:] = np.arange(options.size - start)
    return rows


def load_or_pack(
    path: str | None, metadata: str | None, options: PackOptions, read: Callable[[], list[Sample]]
) -> PackedDataset:
    """Take the packed file if it exists; else pack the samples of `read`, and rank 0 writes the named files.

    Every rank calls it. Raises ConfigError: the file is not a packed set of this size, or cannot be written.
    """
    is_there = path is not None and Path(path).is_file()
    if dist.is_initialized():
        dist.barrier()  # no rank writes before all have looked
    if path is not None and is_there:
        return PackedDataset(_load(Path(path), options))
    packed = PackedDataset(pack(read(), options))
    if not dist.is_initialized() or dist.get_rank() == 0:
        if path is not None:
            _write(Path(path), lambda file: np.save(file, packed.rows, allow_pickle=False))
        if metadata is not None:
            facts = {
                "packed_sequence_size": options.size,
                "num_packed_sequences": len(packed),
                "max_samples_per_bin": packed.max_boundaries - 1,
                "dataset_max_seqlen": packed.longest,
                "packing_factor": round(sum(len(_bounds(row)) - 1 for row in packed.rows) / len(packed), 3),
            }
            _write(Path(metadata), lambda file: file.write((json.dumps(facts, indent=2) + "\n").encode()))
    return packed


def _padded(length: int, options: PackOptions) -> int:
    padded = -(-length // options.unit) * options.unit
    if padded > options.size:
        raise ConfigError(
            f"dataset.packed_sequence_specs.packed_sequence_size = {options.size}: a sample of {length} tokens, padded"
            f" to a multiple of {options.unit}, does not fit; use a multiple of {options.unit}"
        )
    return padded


def _bounds(row: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(row[_POSITION_IDS] == 0)
    return np.append(starts, row.shape[1]).astype(np.int32)


def _load(path: Path, options: PackOptions) -> np.ndarray:
    remedy = "remove it to pack again, or name another file"
    try:
        rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a packed set of this program ({error}); {remedy}") from error
    if rows.dtype != np.int32 or rows.ndim != 3 or rows.shape[1] != 4 or not len(rows):
        raise ConfigError(f"{path} is not a packed set of this program: {rows.dtype} {rows.shape}; {remedy}")
    if rows.shape[2] != options.size:
        raise ConfigError(
            f"{path} is packed to {rows.shape[2]} tokens, and packed_sequence_size is {options.size}; {remedy}"
        )
    return rows


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, write)
    except OSError as error:
        raise ConfigError(f"dataset.packed_sequence_specs: {path} cannot be written: {error}") from error
