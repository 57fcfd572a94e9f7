"""Partitions of a cluster with their nodes and time limits, as sinfo prints them."""

import re
from dataclasses import dataclass

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.models.slurm_values import parse_time_limit
from cloudai_mbridge.schedulers.slurm.commands import complaint_of, run_command

# sinfo puts nodes that are alike in all of this on one line
_FORMAT = "%P|%l|%D|%N|%G"
_GPUS = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:([0-9]+)(?=[,(]|$)")


@dataclass(frozen=True)
class PartitionNodes:
    """Nodes of a partition that have the same GPUs. names: as Slurm writes a list. gpus: of each; 0: none known.

    time_limit_s: of a job in the partition; None: none.
    """

    partition: str
    is_default: bool
    time_limit_s: float | None
    num_nodes: int
    names: str
    gpus: int
    gpu_type: str | None


def find_nodes(partition: str | None) -> PartitionNodes:
    """Return the nodes of a partition, None: of the default one; of several kinds the one with GPUs, then the largest.

    BadInput: no such partition. ToolFailure: Slurm does not answer.
    """
    answer = run_command("sinfo", "--all", "--noheader", f"--format={_FORMAT}")
    if answer.returncode != 0:
        raise ToolFailure(
            f"Slurm does not respond: {complaint_of(answer)}; check SLURM_CONF and the controller, or use --local"
        )
    known = parse_nodes(answer.stdout)
    names = ", ".join(sorted({nodes.partition for nodes in known})) or "none with nodes"
    found = [nodes for nodes in known if nodes.partition == partition or (partition is None and nodes.is_default)]
    if not found:
        what = f"Slurm has no partition {partition!r}" if partition else "Slurm has no default partition"
        raise BadInput(f"--partition: {what}; use one of {names}")
    return max(found, key=lambda nodes: (nodes.gpus > 0, nodes.num_nodes))


def parse_nodes(text: str) -> list[PartitionNodes]:
    """Return a row for every kind of node in every partition that has nodes."""
    found = []
    for row in (line.split("|", 4) for line in text.splitlines()):
        if len(row) == 5 and row[3]:
            partition, time_limit, number, names, gres = row
            gpus = _GPUS.findall(gres)
            types = {kind for kind, _ in gpus if kind}
            nodes = PartitionNodes(
                partition=partition.removesuffix("*"),
                is_default=partition.endswith("*"),
                time_limit_s=allowed_s(time_limit),
                num_nodes=int(number),
                names=names,
                gpus=sum(int(count) for _, count in gpus),
                gpu_type=types.pop() if len(types) == 1 else None,
            )
            found.append(nodes)
    return found


def allowed_s(text: str) -> float | None:
    """Return the seconds of a time limit of sinfo's, None for no limit."""
    try:
        return parse_time_limit(text)
    except ValueError:  # infinite, n/a
        return None
