"""Input of a run: datasets, the order of their samples, and the iterators over micro-batches."""

from cloudai_mbridge.training.data.iterators import build_data_iterators, build_for_epochs, check_data_config

__all__ = ["build_data_iterators", "build_for_epochs", "check_data_config"]
