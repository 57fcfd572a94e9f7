"""What the numbers of a run mean: its FLOPs, by which formula, and which memory."""

import math
import re
from collections.abc import Mapping
from typing import Any

from cloudai_mbridge.metrics import Definitions
from cloudai_mbridge.training.process.log_lines import RESERVED_MEMORY, RESIDENT_MEMORY

# A commit, or the tag of a release. A branch is neither: what it means changes
_PINNED = re.compile(r"[0-9a-f]{7,40}|v?\d+(\.\d+)+([._-]?[A-Za-z0-9]+)*")


def definitions_of(run: Mapping[str, Any], said: Mapping[str, Any]) -> Definitions:
    """Return what the training said of itself; for the upstream launcher, the version that counts its FLOPs.

    said: text from a log. What has another type than it should is left out.
    """
    upstream, flops, kind = run.get("upstream"), said.get("flops_per_step"), said.get("memory_kind")
    formula = _upstream_formula(upstream) if upstream else said.get("flops_formula")
    return Definitions(
        flops_per_step=_positive(flops),
        flops_formula=formula if isinstance(formula, str) and formula else None,
        memory_kind=kind if kind in (RESERVED_MEMORY, RESIDENT_MEMORY) else None,
    )


def _upstream_formula(upstream: Mapping[str, Any]) -> str | None:
    commit = upstream["megatron_bridge"]["commit"]
    return f"upstream@{commit}" if _PINNED.fullmatch(commit) else None


def _positive(value: Any) -> float | None:
    """Return a number above zero; True is none, and neither is one too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def tokens_per_step_per_gpu(args: Mapping[str, Any], world_size: int) -> float | None:
    """Return the tokens of one step for each rank, None where the batch or the length is not known."""
    batch, length = args.get("gb"), args.get("seq_length")
    return batch * length / world_size if batch and length else None
