"""Sums of the losses since the last report, kept on the device: reading a number from a GPU would stop it."""

import math
from typing import Any

import torch

ADVANCED, SKIPPED, NAN = "advanced iterations", "skipped iterations", "nan iterations"
_COUNTERS = (ADVANCED, SKIPPED, NAN)


def accumulate(total_loss_dict: dict[str, Any], loss_dict: dict[str, torch.Tensor], is_skipped: bool) -> None:
    """Add a step. One that the optimizer skipped only counts, and as a NaN one if any of its losses is not finite."""
    for name in _COUNTERS:
        total_loss_dict.setdefault(name, 0)
    total_loss_dict[SKIPPED if is_skipped else ADVANCED] += 1
    if is_skipped:
        total_loss_dict[NAN] += any(not math.isfinite(float(loss.float().sum())) for loss in loss_dict.values())
        return
    for name, loss in loss_dict.items():
        value = loss.detach().float().reshape(1)
        total_loss_dict[name] = total_loss_dict[name] + value if name in total_loss_dict else value.clone()


def total_iterations(total_loss_dict: dict[str, Any]) -> int:
    """Return the steps since the last report."""
    return int(total_loss_dict[ADVANCED] + total_loss_dict[SKIPPED])


def averages(total_loss_dict: dict[str, Any]) -> dict[str, float]:
    """Return each loss's mean over the steps that were not skipped; 0 if all were."""
    advanced = max(1, total_loss_dict[ADVANCED])
    sums = {name: total for name, total in total_loss_dict.items() if name not in _COUNTERS}
    return {name: float(total) / advanced for name, total in sums.items()}


def reset(total_loss_dict: dict[str, Any]) -> None:
    """Start the next interval."""
    for name, total in total_loss_dict.items():
        total_loss_dict[name] = 0 if name in _COUNTERS else torch.zeros(1, device=total.device)
