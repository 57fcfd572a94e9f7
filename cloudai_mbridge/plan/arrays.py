"""Which runs may share a job array: those that need the same resources and the same credentials."""

from collections.abc import Iterable
from dataclasses import replace

from cloudai_mbridge.files.run_files import ROOT_FILES
from cloudai_mbridge.models.system import Executor, SlurmSystem, System
from cloudai_mbridge.plan.run_plan import RunPlan

# Slurm's default MaxArraySize is 1001, which allows the indices 0 to 1000.
MOST_TASKS = 1000


def assign_arrays(runs: Iterable[RunPlan], system: System) -> tuple[RunPlan, ...]:
    """Return the runs, with an array and an index where at least two share one."""
    ordered = list(runs)
    if not isinstance(system, SlurmSystem) or system.executor is not Executor.MBRIDGE:
        return tuple(ordered)
    groups: dict[object, list[RunPlan]] = {}
    for run in ordered:
        if run.upstream is None and not run.is_pre_test:
            groups.setdefault(_needs(run), []).append(run)
    arrays = [
        chunk
        for group in groups.values()
        for start in range(0, len(group), MOST_TASKS)
        if len(chunk := group[start : start + MOST_TASKS]) > 1
    ]
    place = {
        run.key: (f"{ROOT_FILES.arrays}/{number}", index)
        for number, chunk in enumerate(arrays)
        for index, run in enumerate(chunk)
    }
    return tuple(_placed(run, *place[run.key]) if run.key in place else run for run in ordered)


def _needs(run: RunPlan) -> object:
    secrets = tuple(sorted(run.secret_env.items()))
    return run.num_nodes, run.ranks_per_node, run.time_limit, run.nodes, run.exclude_nodes, secrets


def _placed(run: RunPlan, array: str, index: int) -> RunPlan:
    return replace(run, array=array, array_index=index)
