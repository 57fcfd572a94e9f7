"""`nodes = ["PARTITION:GROUP:COUNT"]`: so many nodes of a group that the system file lists."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.hostlist import expand_hostlist
from cloudai_mbridge.models.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.system import SlurmSystem, System

# Partition -> node -> its state as `sinfo` writes it, or None if Slurm cannot be asked.
NodeStates = Callable[[str], Mapping[str, str] | None]
MAX_AVAILABLE = "max_avail"  # as many as are free now
_IN_USE = ("alloc", "mix")
_OUT_OF_SERVICE = ("down", "drain", "drng", "fail", "maint", "unk", "boot", "power")


def unknown_states(partition: str) -> None:
    """Know of no state: the nodes are taken in the order of the system file."""


def resolve_groups(loaded: LoadedScenario, system: System, states: NodeStates) -> LoadedScenario:
    """Replace every PARTITION:GROUP:COUNT of the scenario by the names of nodes.

    Raises:
        BadInput: no such partition or group, or it has too few nodes in service.
    """
    tests = [_resolved(test, system, states) for test in loaded.tests]
    pre, post = (
        tuple(_resolved(test, system, states) for test in hook) for hook in (loaded.pre_hook, loaded.post_hook)
    )
    return replace(loaded, tests=tests, pre_hook=pre, post_hook=post)


def _resolved(test: LoadedTest, system: System, states: NodeStates) -> LoadedTest:
    if not any(":" in node for node in test.run.nodes):
        return test
    where = f"test {test.run.id!r}: nodes"
    left_out = {name for nodes in test.run.exclude_nodes for name in expand_hostlist(nodes)}
    chosen: list[str] = []
    for spec in test.run.nodes:
        chosen += _of_group(spec, system, states, {*chosen, *left_out}, where) if ":" in spec else [spec]
    update: dict[str, object] = {"nodes": chosen, "num_nodes": len({n for c in chosen for n in expand_hostlist(c)})}
    return replace(test, run=test.run.model_copy(update=update))


def _of_group(spec: str, system: System, states: NodeStates, left_out: set[str], where: str) -> list[str]:
    partition, _, rest = spec.partition(":")
    group, _, count = rest.partition(":")
    if not (partition and group and (count == MAX_AVAILABLE or count.isdecimal())):
        raise BadInput(f"{where}: {spec!r} is not PARTITION:GROUP:COUNT, where COUNT is a number or {MAX_AVAILABLE!r}")
    known = states(partition)
    free = [name for name in _names(partition, group, system, where) if name not in left_out]
    usable = [name for name in free if known is None or _is_in_service(known.get(name, "unknown"))]
    if count == MAX_AVAILABLE:
        usable = [name for name in usable if not (known or {}).get(name, "").startswith(_IN_USE)]
    wanted = len(usable) if count == MAX_AVAILABLE else int(count)
    if not 0 < wanted <= len(usable):
        out = sorted(set(free) - set(usable))
        note = f"; out of service: {', '.join(out)}" if out else ""
        raise BadInput(f"{where}: {spec!r}: nodes to use in the group: {len(usable)}{note}; ask for fewer")
    return sorted(usable, key=lambda name: _busy(name, known))[:wanted]


def _is_in_service(state: str) -> bool:
    return not state.endswith("*") and not state.startswith(_OUT_OF_SERVICE)


def _busy(name: str, states: Mapping[str, str] | None) -> int:
    """Return 0 for an idle node, so that it is taken first; the order is the file's otherwise."""
    state = (states or {}).get(name, "")
    return 0 if state.startswith("idle") else 1 if state.startswith("comp") else 2


def _names(partition: str, group: str, system: System, where: str) -> list[str]:
    partitions = {each.name: each for each in system.partitions} if isinstance(system, SlurmSystem) else {}
    if partition not in partitions:
        raise BadInput(f"{where}: no partition {partition!r} in system {system.name!r}; known: {', '.join(partitions)}")
    groups = {each.name: each for each in partitions[partition].groups}
    if group not in groups:
        raise BadInput(f"{where}: no group {group!r} in partition {partition!r}; known: {', '.join(groups) or 'none'}")
    return list(dict.fromkeys(name for nodes in groups[group].nodes for name in expand_hostlist(nodes)))
