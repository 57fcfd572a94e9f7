"""The random-number generators of a rank, kept as they are while a user's code runs."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def tracker_states() -> dict[str, torch.Tensor]:
    """Return copies of the states of Megatron's tracker, as tensors whatever kind of tracker it is."""
    states = get_cuda_rng_tracker().get_states()
    return {name: _as_tensor(state) for name, state in states.items()}


def set_tracker_states(states: Mapping[str, Any]) -> None:
    """Set the states that `tracker_states` returned, of any kind of tracker.

    A tracker that CUDA graphs can capture has generators, and graphs draw from these: they stay, with other states.
    """
    tracker = get_cuda_rng_tracker()
    own = tracker.get_states()
    if not any(isinstance(state, torch.Generator) for state in own.values()):
        tracker.set_states({name: _as_tensor(state) for name, state in states.items()})
        return
    for name, state in states.items():
        if name in own:
            own[name].set_state(_as_tensor(state))


def _as_tensor(state: Any) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore every generator that dropout and data draw from: Python's, NumPy's, torch's, Megatron's tracker."""
    python, numpy, tracked = random.getstate(), np.random.get_state(), tracker_states()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            set_tracker_states(tracked)
