"""The losses of the routers: a dictionary with functions around it up to 0.17, an object from 0.18 on."""

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from cloudai_mbridge.training.process.device import current_device

_HAS_TRACKER = hasattr(moe_utils, "get_moe_metrics_tracker")


def report_router_losses(names: list[str], length: int, **options: Any) -> None:
    """Reduce, log and clear these losses. A collective.

    length: of every loss, the layers that may have routers; a stage without any takes part with zeros.
    options: as `track_moe_metrics` of Megatron-Core 0.16 takes them.
    """
    _make_room(names, length)
    report = moe_utils.get_moe_metrics_tracker().report if _HAS_TRACKER else moe_utils.track_moe_metrics
    report(track_names=names, **options)


def _make_room(names: list[str], length: int) -> None:
    """Give a stage without routers the empty entries that the sum over stages needs, as long as the others'."""
    if _HAS_TRACKER:
        for name in names:
            moe_utils.get_moe_metrics_tracker().ensure_initialized(name, length, current_device())
        return
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    for name in names:
        if name not in tracker:
            values = torch.zeros(length, device=current_device())
            tracker[name] = {"values": values, "reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
