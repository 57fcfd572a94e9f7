"""The parts of a step, grouped by common errors on a cluster, and their time together."""

from collections.abc import Iterable
from typing import NamedTuple

from cloudai_mbridge.estimate.cluster import FACTORS
from cloudai_mbridge.estimate.time.parts import IdealTimes

# Launches by the host are a separate group: not a part, but the GPU may have to wait for them
_GROUPS = {
    "compute": (
        *(name for name in IdealTimes._fields if name.startswith("matmul")),
        *("attention_core", "attention_exp", "sparse_core"),
    ),
    "memory": ("memory_matmul", "memory_experts", "memory_weights", "elementwise", "activation", "routing", "scan"),
    "experts": ("launches_moe", "launches_experts", "launches_network", "ep_nvlink", "ep_network"),
    "links": ("tp_comm", "cp_comm", "pp_comm"),
    "data_parallel": ("dp_comm", "fsdp_comm"),
    "optimizer": ("optimizer",),
}
GROUP_OF = {part: group for group, parts in _GROUPS.items() for part in parts}
# Launches and work of similar length overlap badly: together they take their power mean of this exponent
SHARPNESS = 4.0


class StepGroups(NamedTuple):
    """Seconds of a step's parts in groups, of the host's launches, and the pipeline's idle share.

    The first four and the launches run at the same time, 1 + bubble times; then come the last two.
    """

    compute: float
    memory: float
    experts: float
    links: float
    launches: float
    data_parallel: float
    optimizer: float
    bubble: float


def grouped(parts: Iterable[float], launches: float, bubble: float) -> StepGroups:
    """Add up the seconds of `IdealTimes`, in their order."""
    sums = dict.fromkeys(FACTORS, 0.0)
    for name, seconds in zip(IdealTimes._fields, parts, strict=True):
        sums[GROUP_OF[name]] += seconds
    return StepGroups(**{**sums, "launches": launches}, bubble=bubble)


def together_s(busy: float, launches: float) -> float:
    """Return the seconds of the GPU's work and the host's launches, which overlap: a soft maximum."""
    longer, shorter = (busy, launches) if busy > launches else (launches, busy)
    return longer * (1 + (shorter / longer) ** SHARPNESS) ** (1 / SHARPNESS) if longer else 0.0
