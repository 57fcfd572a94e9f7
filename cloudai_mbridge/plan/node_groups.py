"""`nodes = ["PARTITION:GROUP:COUNT"]`: so many nodes of a group that the system file lists."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import LoadedScenario, LoadedTest
from cloudai_mbridge.models.slurm_values import expand_hostlist, is_free, is_out_of_service, parse_group
from cloudai_mbridge.models.system import System

# Partition -> node -> its state as `sinfo` writes it, or None if Slurm does not answer.
NodeStates = Callable[[str], Mapping[str, str] | None]


def unknown_states(partition: str) -> None:
    """Return no states: the nodes are taken in the order of the system file."""


def resolve_groups(loaded: LoadedScenario, system: System, states: NodeStates) -> LoadedScenario:
    """Replace every PARTITION:GROUP:COUNT of the scenario by the names of nodes, and take excluded nodes out.

    BadInput: no such partition or group, it has too few nodes in service, or every named node is excluded.
    """
    tests, pre, post = (
        [_resolved(test, system, states) for test in group]
        for group in (loaded.tests, loaded.pre_hook, loaded.post_hook)
    )
    return replace(loaded, tests=tests, pre_hook=tuple(pre), post_hook=tuple(post))


def _resolved(test: LoadedTest, system: System, states: NodeStates) -> LoadedTest:
    run = test.run
    excluded = {name for nodes in run.exclude_nodes for name in expand_hostlist(nodes)}
    named = {name for spec in run.nodes if ":" not in spec for name in expand_hostlist(spec)}
    if not named & excluded and not any(":" in spec for spec in run.nodes):
        return test
    where = f"test {run.id!r}: nodes"
    chosen: list[str] = []
    for spec in run.nodes:
        if ":" in spec:
            chosen += _of_group(spec, system, states, {*chosen, *excluded}, where)
        else:
            chosen += [name for name in expand_hostlist(spec) if name not in excluded]
    if not chosen:
        raise BadInput(f"{where}: exclude_nodes excludes all of {', '.join(run.nodes)}; remove one of the two")
    chosen = list(dict.fromkeys(chosen))
    return replace(test, run=run.model_copy(update={"nodes": chosen, "num_nodes": len(chosen)}))


def _of_group(spec: str, system: System, states: NodeStates, left_out: set[str], where: str) -> list[str]:
    partition, group, count = parse_group(spec)
    known = states(partition)
    listed = [name for name in _names(partition, group, system, where) if name not in left_out]
    state_of = {name: (known or {}).get(name, "unknown") for name in listed}

    def is_usable(state: str) -> bool:
        return is_free(state) if count is None else not is_out_of_service(state)

    usable = [name for name in listed if known is None or is_usable(state_of[name])]
    wanted = len(usable) if count is None else count
    if not 0 < wanted <= len(usable):
        rest = [f"{name} ({state_of[name]})" for name in sorted(set(listed) - set(usable))]
        note = f"; not usable: {', '.join(rest)}" if rest else ""
        raise BadInput(f"{where}: {spec!r}: nodes to use in the group: {len(usable)}{note}; ask for fewer")
    # idle nodes first, then nodes whose job is ending; otherwise the order of the file
    usable.sort(key=lambda name: [not state_of[name].startswith(first) for first in ("idle", "comp")])
    return usable[:wanted]


def _names(partition: str, group: str, system: System, where: str) -> list[str]:
    partitions = {each.name: each for each in system.partitions}
    if partition not in partitions:
        raise BadInput(f"{where}: no partition {partition!r} in system {system.name!r}; known: {', '.join(partitions)}")
    groups = {each.name: each for each in partitions[partition].groups}
    if group not in groups:
        raise BadInput(f"{where}: no group {group!r} in partition {partition!r}; known: {', '.join(groups) or 'none'}")
    return list(dict.fromkeys(name for nodes in groups[group].nodes for name in expand_hostlist(nodes)))
