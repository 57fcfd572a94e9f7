"""Megatron-Bridge's name for the model FLOPs of a configuration; the formulas are in `training.flops`."""

from typing import Any

from cloudai_mbridge.training.utils.step_flops import flops_of_batch


def num_floating_point_operations(cfg: Any, batch_size: int = 1) -> int:
    """Return the model FLOPs to train on `batch_size` sequences of the model's length."""
    return flops_of_batch(cfg.model, batch_size, int(cfg.model.seq_length))


__all__ = ["num_floating_point_operations"]
