"""A context-parallel rank's share of a batch: since 0.18 Megatron has a flag for hybrid context parallelism."""

import inspect
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.utils import get_batch_on_this_cp_rank

_HYBRID = "is_hybrid_cp"
_OPTIONS = {_HYBRID: False} if _HYBRID in inspect.signature(get_batch_on_this_cp_rank).parameters else {}


def batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Cut tensors of whole, unpacked sequences to this rank's two chunks."""
    group = mpu.get_context_parallel_group()  # without it, 0.18 takes all ranks for the group
    share: dict[str, Any] = get_batch_on_this_cp_rank(batch, cp_group=group, **_OPTIONS)
    return share
