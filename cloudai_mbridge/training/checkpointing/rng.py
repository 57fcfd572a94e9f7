"""The random number generators of one rank: Python's, NumPy's, torch's, the device's, and Megatron's own states."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from cloudai_mbridge.training.device import current_device


def rng_state() -> dict[str, Any]:
    """Return this rank's states as tensors and plain values."""
    numpy_state: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = numpy_state
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (str(kind), torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch_rng_state": torch.get_rng_state(),
        "device_rng_state": None if current_device().type == "cpu" else torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Take what `rng_state` returned, on the same rank of the same layout."""
    random.setstate(state["random_rng_state"])
    kind, keys, position, has_gauss, cached = state["np_rng_state"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch_rng_state"])
    if state["device_rng_state"] is not None and current_device().type != "cpu":
        torch.cuda.set_rng_state(state["device_rng_state"])
    get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def sharded_rng_state() -> ShardedObject:
    """Return the states as this rank's part of one object over all ranks."""
    return ShardedObject("rng_state", rng_state(), (dist.get_world_size(),), (dist.get_rank(),))
