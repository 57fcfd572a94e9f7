"""Random number generators in checkpoints: written in Megatron-Bridge's form, read in that one and in our older one.

Megatron-Bridge saves one object over (pp, tp), and over (pp, tp, dp) with expert parallelism. Each part is a list: one
state, or one for each data-parallel rank. Our older form is an object over all ranks, each part a single state.
"""

import hashlib
import random
import re
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedObject

from cloudai_mbridge.training.checkpointing.verify import read_metadata
from cloudai_mbridge.training.process.generators import set_tracker_states, tracker_states

KEY = "rng_state"
_DIMENSIONS = ("pp", "tp", "dp")

State = dict[str, Any]


def states_to_save(*, of_replicas: bool = False) -> ShardedObject:
    """Return the states as this rank's part of the object. A collective.

    of_replicas: of every data-parallel rank, as with `rng.data_parallel_random_init`. Without, Megatron-Bridge takes
    the states of data-parallel ranks for equal and keeps the first. They differ after dropout in
    batches of different lengths; then all are kept, and Megatron-Bridge still takes the first.
    """
    shape, place = _grid()
    if not of_replicas and len(shape) == 2:
        of_replicas = len(set(_gathered(_fingerprint(state())))) > 1
    return _part(own_states(of_replicas=of_replicas), shape, place)


def own_states(*, of_replicas: bool) -> list[State]:
    """Return the states of this rank, or, in a collective, of its data-parallel ranks."""
    own = state()
    return _gathered(own) if of_replicas else [own]


def _gathered(own: Any) -> list[Any]:
    replicas = mpu.get_data_parallel_group(with_context_parallel=True)
    every: list[Any] = [None] * replicas.size()
    dist.all_gather_object(every, own, group=replicas)
    return every


def states_to_load(directory: str) -> ShardedObject:
    """Return the object to load from a checkpoint whose states can be restored."""
    shape = saved_shape(directory)
    if shape is not None and len(shape) == 1:
        return ShardedObject(KEY, None, shape, (dist.get_rank(),))
    return _part(None, *_grid())


def restore(loaded: Any) -> bool:
    """Set this rank's generators; return False, and set nothing, if they belong to another kind of device."""
    states = loaded if isinstance(loaded, list) else [loaded]
    replicas = mpu.get_data_parallel_group(with_context_parallel=True)
    saved: State = states[replicas.rank() if len(states) == replicas.size() else 0]
    device_state = saved.get("cuda_rng_state", saved.get("device_rng_state"))
    if device_state is not None:  # our older form has none on a CPU
        if device_state.numel() != torch.cuda.get_rng_state().numel():
            return False
        torch.cuda.set_rng_state(device_state)
    random.setstate(saved["random_rng_state"])
    kind, keys, position, has_gauss, cached = saved["np_rng_state"]
    np.random.set_state((kind, np.asarray(keys).astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch_rng_state"])
    set_tracker_states(saved["rng_tracker_states"])
    return True


def saved_shape(directory: str, key: str = KEY) -> tuple[int, ...] | None:
    """Return the shape of an object in a checkpoint; None if it holds no such object."""
    name = re.compile(rf"{key}/shard_[\d.]+_([\d.]+)")
    found = (name.fullmatch(each) for each in read_metadata(directory).state_dict_metadata)
    return next((tuple(map(int, match[1].split("."))) for match in found if match), None)


def why_not(directory: str, *, is_same_layout: bool) -> str | None:
    """Return a human-readable reason why this run cannot restore a checkpoint's states; None if it can."""
    shape, own = saved_shape(directory), _grid()[0]
    if shape is None:
        return "the checkpoint contains none"
    if len(shape) == 1:
        return None if is_same_layout else "the parallelism differs from the checkpoint's"
    if shape == own:
        return None
    was, now = (", ".join(f"{n} {size}" for n, size in zip(_DIMENSIONS, sizes, strict=False)) for sizes in (shape, own))
    return f"they were saved for {was}, and this run has {now}"


def _grid() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of the object, and this rank's place in it."""
    groups = [mpu.get_pipeline_model_parallel_group(), mpu.get_tensor_model_parallel_group()]
    if mpu.get_expert_model_parallel_world_size() > 1:
        groups.append(mpu.get_data_parallel_group(with_context_parallel=True))
    return tuple(group.size() for group in groups), tuple(group.rank() for group in groups)


def _part(states: Any, shape: tuple[int, ...], place: tuple[int, ...]) -> ShardedObject:
    replica = 0 if len(shape) == 3 else mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject(KEY, states, shape, place, replica_id=replica)


def state() -> State:
    """Return the states of this rank's generators."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tracker_states(),
    }


def _fingerprint(state: State) -> str:
    _, keys, *rest = state["np_rng_state"]
    digest = hashlib.sha256(repr((state["random_rng_state"], rest)).encode() + keys.tobytes())
    for tensor in (state["torch_rng_state"], state["cuda_rng_state"], *state["rng_tracker_states"].values()):
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
