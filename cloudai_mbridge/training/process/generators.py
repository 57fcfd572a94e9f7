"""The random-number generators of a rank, kept as they are while a user's code runs."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore every generator that dropout and data draw from: Python's, NumPy's, torch's, Megatron's tracker."""
    python, numpy, tracked = random.getstate(), np.random.get_state(), get_cuda_rng_tracker().get_states()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            get_cuda_rng_tracker().set_states(tracked)
