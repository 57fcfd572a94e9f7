"""How much results vary when a step is computed twice, and how two results are compared."""

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core.rerun_state_machine import COMPARISON_MATCH, COMPARISON_MISMATCH, Caller, QuickStats

from cloudai_mbridge.training.process.log_lines import write_line


class DeterminismStats(QuickStats):  # type: ignore[misc]
    """Megatron's statistics of one validation, which travel whole between ranks."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def relative_difference(first: Any, second: Any) -> float:
    """Return 0 for equal results (two NaNs too), infinity if one is not finite or their sum is 0, else |2(a-b)/(a+b)|.

    The results are floats or tensors of one element.
    """
    a, b = float(first), float(second)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return float(COMPARISON_MATCH)
    mean = a / 2 + b / 2
    if mean == 0 or not (math.isfinite(a) and math.isfinite(b)):
        return float(COMPARISON_MISMATCH)
    return abs((a - b) / mean)


def report_stats(stats: Mapping[Caller, QuickStats]) -> None:
    """Print, on rank 0, the statistics of all ranks since the start, and reset them on the others. Collective."""
    gathered: list[Any] = [dict(stats)]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(dict(stats), everyone)
        if everyone is None:
            for mine in stats.values():
                mine.reset()
            return
        gathered = everyone
    write_line("Stats on computation determinism in validation calls")
    for caller in sorted(set().union(*gathered)):
        # rank 0 may not have made this call: only the last pipeline stage computes a loss
        mine = stats[caller]
        mine.combine([theirs[caller] for theirs in gathered[1:] if caller in theirs])
        write_line(f"  {caller.message}: {mine.print_stats()}")
