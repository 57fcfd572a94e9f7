"""Check a checkpoint before it is loaded: whether its files are whole, and whether it fits this run's model."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from cloudai_mbridge.training.checkpointing.layout import is_of_fsdp
from cloudai_mbridge.training.compat.checkpoints import COMMON_FILE, common_place, read_common_file, read_common_object
from cloudai_mbridge.training.errors import CheckpointError

_SHOWN = 3


def check_files(directory: str) -> None:
    """Check that every file is there, readable and long enough. Raises CheckpointError: with the file's path."""
    root = Path(directory)
    if is_of_fsdp(root):
        _check_lengths(root, read_metadata(directory))
        return
    try:
        backend = json.loads((root / "metadata.json").read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory}: is not a checkpoint of Megatron-Core: metadata.json cannot be read"
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(f"{directory}: is in the format {backend!r}; only 'torch_dist' can be loaded")
    _check_lengths(root, read_metadata(directory))
    read_common(directory)


def read_metadata(directory: str) -> Metadata:
    """Return the index of the tensors: a pickle, and pickles run code: load checkpoints of a source that you trust."""
    try:
        return _index(directory, Path(directory, ".metadata").stat().st_mtime_ns)
    except Exception as error:  # whatever a damaged pickle raises
        raise CheckpointError(f"{directory}/.metadata: cannot be read ({type(error).__name__})") from error


def forget_metadata() -> None:
    """Free the index of the last checkpoint, which is large for thousands of ranks; a load reads it once."""
    _index.cache_clear()


@lru_cache(maxsize=1)
def _index(directory: str, _modified_ns: int) -> Metadata:
    return FileSystemReader(directory).read_metadata()


def read_common(directory: str) -> dict[str, Any]:
    """Return the common part, equal on all ranks; only plain values and tensors are taken from it."""
    place = common_place(read_metadata(directory))
    path = f"{directory}/{COMMON_FILE if place is None else place.relative_path}"
    try:
        return read_common_file(directory) if place is None else read_common_object(directory, place)
    except Exception as error:  # whatever a damaged file raises
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__})") from error


def _check_lengths(root: Path, metadata: Metadata) -> None:
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, length in sorted(needed.items()):
        path = root / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        if path.stat().st_size < length:
            raise CheckpointError(f"{path}: is cut off: {path.stat().st_size} bytes of {length}")


def check_fit(directory: str, tree: dict[str, Any], *, allow_missing: bool) -> list[str]:
    """Check that the checkpoint holds every tensor of `tree` in its global shape.

    Returns the tensors with another, permitted shape: padded to a multiple of the tensor-parallel size.
    Raises CheckpointError: names the first few tensors that are missing or of another shape.
    """
    saved = read_metadata(directory).state_dict_metadata
    wanted = {tensor.key: tensor for tensor in _sharded_tensors(tree)}
    problems: list[str] = []
    resized: list[str] = []
    for key, tensor in sorted(wanted.items()):
        there = saved.get(key)
        if not isinstance(there, TensorStorageMetadata):
            if not allow_missing:
                problems.append(f"{key} is not in it")
        elif tuple(there.size) != tuple(tensor.global_shape):
            text = f"{key} is {list(there.size)} in it and {list(tensor.global_shape)} here"
            (resized if tensor.allow_shape_mismatch else problems).append(text)
    if problems:
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{directory}: does not fit this model: {'; '.join(problems[:_SHOWN])}{more}")
    return resized


def _sharded_tensors(tree: Any) -> Iterator[ShardedTensor]:
    for value in nested_values(tree):
        if isinstance(value, ShardedTensorFactory):
            yield from _sharded_tensors({"": value.build()})
        elif isinstance(value, ShardedTensor):
            yield value
