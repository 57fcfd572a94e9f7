"""Placement of a job's nodes in NVLink domains: sbatch --segment, of Slurm's block topology.

Source: sbatch(1), --segment: the nodes of a job are given out in groups of that size, each within one block.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.models.scenario import AUTO, TestRun
from cloudai_mbridge.models.system import System

if TYPE_CHECKING:
    from cloudai_mbridge.plan.run_plan import RunPlan

_OPTION = "--segment"
_DISPATCHER, _IN_A_DOMAIN = "moe_flex_dispatcher_backend", "hybridep"


def domain_nodes(gpu: str, gpus_per_node: int | None) -> int | None:
    """Return the nodes that one NVLink domain joins, None if the GPU or the size of its nodes is unknown."""
    found = find_gpu(gpu) if gpu else None
    per_node = gpus_per_node or (found.gpus_per_node if found else None)
    return max(1, found.nvlink_domain // per_node) if found and per_node else None


def segment_of(run: TestRun, system: System, gpu: str, num_nodes: int) -> int | None:
    """Return the nodes of a segment of a job, None for no such request.

    BadInput: the number does not divide the nodes, the system asks for another, or "auto" does not know the domain.
    """
    if run.segment is None or system.is_one_machine:
        return None
    where = f"test {run.id!r}: segment = {run.segment!r}"
    if asks_for_segments(system):
        raise BadInput(f"{where}: the system's extra_sbatch_args set {_OPTION}, too; remove one of them")
    if isinstance(run.segment, int):
        if num_nodes % run.segment:
            raise BadInput(f"{where} does not divide num_nodes = {num_nodes}; use a divisor, or {AUTO!r}")
        return run.segment
    most = domain_nodes(gpu, system.gpus_per_node)
    if most is None:
        raise BadInput(f"{where}: the NVLink domain of {gpu or 'the GPU'!r} is unknown; set gpu_type, or a number")
    divisor = max(size for size in range(1, min(most, num_nodes) + 1) if num_nodes % size == 0)
    return divisor if divisor > 1 else None


def asks_for_segments(system: System) -> bool:
    """Return whether the system's own options of sbatch set a segment."""
    words = [word for option in getattr(system, "extra_sbatch_args", ()) for word in option.split()]
    return any(word == _OPTION or word.startswith(f"{_OPTION}=") for word in words)


def notes_on_segments(runs: Iterable["RunPlan"], system: System) -> Iterator[str]:
    """Yield a line per test whose experts exchange within an NVLink domain of several nodes that no job asks for."""
    if system.is_one_machine or asks_for_segments(system):
        return
    seen = set[str]()
    for run in runs:
        model = run.training_config.get("model") or {}
        ep = int(run.args.get("ep") or 1)
        if run.segment is not None or run.test_id in seen or model.get(_DISPATCHER) != _IN_A_DOMAIN:
            continue
        if ep > run.ranks_per_node:
            seen.add(run.test_id)
            yield (
                f"test {run.test_id!r}: ep = {ep} exchanges tokens within an NVLink domain of several nodes, and its"
                f" jobs ask Slurm for no segment; segment = {AUTO!r} in its [[Tests]] asks for whole groups"
            )
