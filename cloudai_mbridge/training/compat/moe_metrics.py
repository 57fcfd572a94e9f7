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
    # A stage without routers gets the empty entries that the sum over stages needs, as long as other stages'
    if _HAS_TRACKER:
        tracker = moe_utils.get_moe_metrics_tracker()
        for name in names:
            tracker.ensure_initialized(name, length, current_device())
        tracker.report(track_names=names, **options)
        return
    entries = moe_utils.get_moe_layer_wise_logging_tracker()
    for name in names:
        if name not in entries:
            values = torch.zeros(length, device=current_device())
            entries[name] = {"values": values, "reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
    moe_utils.track_moe_metrics(track_names=names, **options)
