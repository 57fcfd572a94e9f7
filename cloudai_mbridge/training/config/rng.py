"""Seeds and random number trackers."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class RNGConfig:
    """Seed of weights, dropout and data, and the trackers that hold the generator states."""

    seed: int = 1234
    te_rng_tracker: bool = False  # Transformer Engine's tracker: CUDA graphs need it
    inference_rng_tracker: bool = False
    data_parallel_random_init: bool = False  # initialise every data-parallel replica with its own seed
