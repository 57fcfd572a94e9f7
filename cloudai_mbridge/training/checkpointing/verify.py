"""Checks of a checkpoint before it is loaded, and results shared by all ranks: a failure on one rank fails every rank,
so that none waits forever."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from cloudai_mbridge.training.checkpointing.layout import TRAIN_STATE, is_of_fsdp
from cloudai_mbridge.training.compat.checkpoints import COMMON_FILE, common_place, read_common_part
from cloudai_mbridge.training.errors import CheckpointError

T = TypeVar("T")


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cut off, or has other bytes than were written."""


FAILURES = (Exception, CheckpointException)  # torch derives its own from BaseException
_CHECKED_BYTES = 1 << 28  # of tensors, by each rank: in about a second
_LONGEST = 300  # characters of another library's error message


def on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its value on every rank. A collective; the value must be picklable.

    Raises CheckpointError: on every rank, if `action` raised anything.
    """
    outcome: list[Any] = [None, None, False]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except FAILURES as error:
            outcome[1:] = one_line(error), isinstance(error, DamagedCheckpoint)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise (DamagedCheckpoint if outcome[2] else CheckpointError)(outcome[1])
    value: T = outcome[0]
    return value


def on_each_rank(path: str, action: Callable[[], T]) -> T:
    """Run `action` on every rank and return its own value. A collective.

    Raises CheckpointError: on every rank, if `action` raised anything on any of them; the first rank's message.
    """
    value, message, cause, is_damaged = None, None, None, False
    try:
        value = action()
    except FAILURES as error:
        text, cause = one_line(error), error
        message = text if path in text else f"{path}: {text}"
        is_damaged = isinstance(error, DamagedCheckpoint)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (message, is_damaged))
    failed = [rank for rank, (text, _) in enumerate(outcomes) if text is not None]
    if failed:
        kind = DamagedCheckpoint if all(outcomes[rank][1] for rank in failed) else CheckpointError
        raise kind(outcomes[failed[0]][0] + ("" if failed[0] == 0 else f" (rank {failed[0]})")) from cause
    return value  # type: ignore[return-value]


def one_line(error: BaseException) -> str:
    """Return an error as one line. torch collects the ranks' errors in one error: the first is taken."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = sorted(error.failures.items())[0]
        return f"{one_line(inner)} (rank {rank})"
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, CheckpointError) else f"{text[:_LONGEST]} ({type(error).__name__})"


def check_files(directory: str) -> None:
    """Check that every file is there, readable and long enough. Raises DamagedCheckpoint: with the file's path.

    `run_config.yaml` is not needed. CheckpointError: another format.
    """
    root, has_common = Path(directory), not is_of_fsdp(Path(directory))
    if has_common:
        try:
            backend = json.loads((root / "metadata.json").read_text(encoding="utf-8"))["sharded_backend"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(
                f"{directory}/metadata.json: cannot be read as Megatron-Core's ({type(error).__name__})"
            ) from error
        if backend != "torch_dist":
            raise CheckpointError(f"{directory}: is in the format {backend!r}; only 'torch_dist' can be loaded")
    needed: dict[str, int] = {}
    for place in (read_metadata(directory).storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, length in sorted(needed.items()):
        path = root / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path}: is missing")
        if path.stat().st_size < length:
            raise DamagedCheckpoint(f"{path}: is cut off: {path.stat().st_size} bytes of {length}")
    if has_common:
        read_common(directory)
        if (root / COMMON_FILE).is_file():
            _check_archive(root / COMMON_FILE, (root / COMMON_FILE).read_bytes())
    if (root / TRAIN_STATE).is_file():  # weights alone have none
        read_counters(directory)


def read_counters(directory: str) -> dict[str, Any]:
    """Return the progress of the run that saved a checkpoint. Raises DamagedCheckpoint: with the file's path."""
    path = Path(directory) / TRAIN_STATE
    try:
        data = path.read_bytes()
        counters: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        int(counters["step"])
    except Exception as error:  # whatever a damaged pickle raises
        raise DamagedCheckpoint(f"{path}: cannot be read ({type(error).__name__})") from error
    _check_archive(path, data)
    return counters


def check_bytes(directory: str) -> None:
    """Check this rank's share of the tensors against the checksums that torch writes beside them.

    Only if the shares are small: all of a large checkpoint would be read twice, for which
    `checkpoint.verify_integrity` is there. Raises DamagedCheckpoint: with the file's path.
    """
    places = [*(read_metadata(directory).storage_data or {}).values()]
    world = dist.get_world_size()
    if sum(place.length for place in places) > _CHECKED_BYTES * world:
        return
    for place in sorted(places, key=lambda each: (each.relative_path, each.offset))[dist.get_rank() :: world]:
        path = Path(directory) / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            _check_archive(path, file.read(place.length))


def _check_archive(path: Path, data: bytes) -> None:
    """Check an archive, which torch.save writes; other bytes are without a checksum. Raises DamagedCheckpoint."""
    if not data.startswith(b"PK"):
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            bad = archive.testzip()
    except Exception as error:  # whatever a damaged archive raises
        bad = type(error).__name__
    if bad is not None:
        raise DamagedCheckpoint(f"{path}: has other bytes than were written ({bad})")


def read_metadata(directory: str) -> Metadata:
    """Return the index of the tensors: a pickle, and pickles run code: load checkpoints of a source that you trust."""
    try:
        return _index(directory, Path(directory, ".metadata").stat().st_mtime_ns)
    except Exception as error:  # whatever a damaged pickle raises
        raise DamagedCheckpoint(f"{directory}/.metadata: cannot be read ({type(error).__name__})") from error


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
        return read_common_part(directory, place)
    except Exception as error:  # whatever a damaged file raises
        raise DamagedCheckpoint(f"{path}: cannot be read ({type(error).__name__})") from error


def check_fit(directory: str, tree: dict[str, Any], *, allow_missing: bool) -> list[str]:
    """Check that the checkpoint holds every tensor of `tree` in its global shape.

    Returns the tensors with another, permitted shape: padded to a multiple of the tensor-parallel size.
    Raises CheckpointError: names the first few tensors that are missing or of another shape.
    """
    saved = read_metadata(directory).state_dict_metadata
    wanted = {tensor.key: tensor for tensor in _sharded_tensors(tree)}
    problems, resized = list[str](), list[str]()
    for key, tensor in sorted(wanted.items()):
        there = saved.get(key)
        if not isinstance(there, TensorStorageMetadata):
            if not allow_missing:
                problems.append(f"{key} is not in it")
        elif tuple(there.size) != tuple(tensor.global_shape):
            text = f"{key} is {list(there.size)} in it and {list(tensor.global_shape)} here"
            (resized if tensor.allow_shape_mismatch else problems).append(text)
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{directory}: does not fit this model: {'; '.join(problems[:3])}{more}")
    return resized


def _sharded_tensors(tree: Any) -> Iterator[ShardedTensor]:
    for value in nested_values(tree):
        if isinstance(value, ShardedTensorFactory):
            yield from _sharded_tensors({"": value.build()})
        elif isinstance(value, ShardedTensor):
            yield value
