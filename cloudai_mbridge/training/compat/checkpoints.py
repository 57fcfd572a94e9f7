"""Reading and writing Megatron-Core's distributed checkpoints.

The common part, equal on all ranks, is a file, common.pt, up to 0.18, and another sharded object from 0.19 on;
every release reads both here. From 0.19 on, Megatron-Core finds a parameter group also by its learning rates, so that
another rate stops with a KeyError: while a state is loaded, groups are found by their kind, as in older releases.
"""

import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, PersistentAsyncCaller
from megatron.core.optimizer import distrib_optimizer, optimizer
from torch.distributed.checkpoint.metadata import Metadata

COMMON_FILE = "common.pt"
COMMON_KEY = "common_state"  # Megatron-Core 0.19's name for it

# The function of `filesystem_async` that makes the queue between a rank and its writers
RESULTS_QUEUE = next(n for n in ("get_write_results_queue", "_get_write_results_queue") if hasattr(filesystem_async, n))

Common = dict[str, Any]

HASHES = "verify_integrity"  # the option of saving and loading that Megatron-Core 0.19 has
_SAVE_OPTIONS = inspect.signature(dist_checkpointing.save).parameters
HAS_HASHES = HASHES in _SAVE_OPTIONS
_WRITER_OPTIONS = inspect.signature(torch_strategies.TorchDistSaveShardedStrategy).parameters

_KEYS = "param_group_identifier_keys"
# Keys that distinguish groups in every release
KIND = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")


def writer(*, thread_count: int, cached_metadata: bool) -> Any:
    """Return the strategy that writes in torch's distributed format."""
    backend = {} if _WRITER_OPTIONS["backend"].default == "torch_dist" else {"backend": "torch_dist", "version": 1}
    return torch_strategies.TorchDistSaveShardedStrategy(
        **backend, thread_count=thread_count, cached_metadata=cached_metadata
    )


def save(tree: dict[str, Any], directory: str, strategy: Any, **options: Any) -> Any:
    """Call `dist_checkpointing.save`, with Megatron-Core's own writer in the background if there is a choice."""
    choice = {"async_strategy": "mcore"} if "async_strategy" in _SAVE_OPTIONS else {}
    with quiet():
        return dist_checkpointing.save(tree, directory, strategy, **choice, **options)


def load(tree: dict[str, Any], directory: str, strategy: Any, common: Callable[[], Common], **options: Any) -> Any:
    """Call `dist_checkpointing.load` with the result of `common` in place of the checkpoint's own common part."""
    with quiet():
        if hasattr(common_strategies, "TorchCommonLoadStrategy"):
            reader = common_strategies.TorchCommonLoadStrategy()
            reader.load_common = lambda checkpoint_dir: common()
            return dist_checkpointing.load(tree, directory, strategy, common_strategy=reader, **options)
        name = "load_common" if hasattr(serialization, "save_common") else "load_common_state_dict"
        with replaced(serialization, name, lambda directory: common()):
            return dist_checkpointing.load(tree, directory, strategy, **options)


def with_hashes(is_wanted: bool) -> dict[str, bool]:
    """Return the option to hash files, or to compare their hashes; {} if not wanted."""
    return {HASHES: True} if is_wanted else {}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of one of Megatron-Core's modules another value while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def common_place(metadata: Metadata) -> Any:
    """Return the place of the common part in the sharded data; None before 0.19."""
    places = metadata.storage_data or {}
    return next((place for index, place in places.items() if index.fqn == f"{COMMON_KEY}/shard_0_1"), None)


def read_common_part(directory: str, place: Any) -> Common:
    """Read the common part at `place`, or from its file; only plain values and tensors are taken from it."""
    if place is None:
        return dict(torch.load(f"{directory}/{COMMON_FILE}", map_location="cpu", weights_only=True))
    with open(f"{directory}/{place.relative_path}", "rb") as file:
        file.seek(place.offset)
        parts = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
    return dict(parts[0])


def abandon_saves(queue: Any) -> None:
    """Kill the worker process that writes checkpoints: Python joins it at exit, and it waits for work forever.

    Not done by `AsyncCallsQueue.close`, which needs the process group in 0.16.
    """
    holder = AsyncCallsQueue if hasattr(AsyncCallsQueue, "_persistent_caller") else queue  # since 0.17 one per process
    caller = getattr(holder, "_persistent_caller", None) or getattr(holder, "persistent_caller", None)
    for process in (getattr(caller, "process", None), getattr(PersistentAsyncCaller, "_persistent_process", None)):
        if process is not None:
            process.kill()
    if caller is not None:
        caller.process = None  # or its destructor would wait


@contextmanager
def quiet() -> Iterator[None]:
    """Drop the warnings about functions of torch that Megatron-Core still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", module="torch.distributed.*")
        yield


def kind_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return a group's kind, in the order of `KIND`; NeMo's names of the multipliers are accepted, too."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in KIND)


@contextmanager
def found_by_kind(*groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let optimizers find their groups by kind; by all of Megatron's keys if two groups of an optimizer share a kind.

    groups: each optimizer's groups, and each saved optimizer's groups in the checkpoint.
    """
    kinds = [[kind_of(group) for group in of_one] for of_one in groups]
    if any(len(set(of_one)) < len(of_one) for of_one in kinds):
        yield
        return
    with replaced(optimizer, _KEYS, KIND), replaced(distrib_optimizer, _KEYS, KIND):
        yield
