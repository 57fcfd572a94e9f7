"""How a point's ranks are laid out over nodes, and the rule that they fit."""

from dataclasses import dataclass

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point, Violation
from cloudai_mbridge.models.system import LocalSystem


@dataclass(frozen=True)
class Placement:
    """`ranks_per_node` ranks on each of `num_nodes` nodes."""

    num_nodes: int
    ranks_per_node: int


def gpus_per_node(point: Point) -> int | None:
    """Return the limit of ranks per node, or None if unlimited."""
    return point.args.gpus_per_node or (point.system.gpus_per_node if point.system else None)


def num_nodes(point: Point) -> int:
    """Return the scenario's number of nodes, else as few as take all ranks; this machine is one node."""
    if point.num_nodes is not None:
        return point.num_nodes
    if isinstance(point.system, LocalSystem):
        return 1
    per_node = gpus_per_node(point)
    return max(1, -(-point.args.num_gpus // per_node)) if per_node else 1


def place(point: Point) -> Placement:
    """Spread the ranks evenly. Only for points that pass M01."""
    nodes = num_nodes(point)
    return Placement(nodes, point.args.num_gpus // nodes)


def m01_ranks_fit_the_nodes(point: Point) -> Answer:
    """The ranks spread evenly over the nodes and no node gets more than it has GPUs.

    torchrun starts the same number of ranks on every node; more ranks than GPUs on a node crash at device selection.

    Pass: num_gpus=8, num_nodes=2, gpus_per_node=4. Fail: num_gpus=8, num_nodes=1, gpus_per_node=4.
    Source: torch.distributed.run, --nnodes and --nproc-per-node.
    """
    if point.system is None:
        return NotEvaluated("M01", "system")
    ranks, nodes, limit = point.args.num_gpus, num_nodes(point), gpus_per_node(point)
    operands = {"num_gpus": ranks, "num_nodes": nodes, "gpus_per_node": limit}
    if isinstance(point.system, LocalSystem) and nodes != 1:
        return Violation("M01", "num_nodes", "this machine is one node", "remove num_nodes or set it to 1", operands)
    if ranks < 1 or nodes < 1 or ranks % nodes:
        fact = f"{ranks} ranks cannot be spread evenly over {nodes} nodes"
        return point.violation("M01", "num_gpus", fact, f"use a positive multiple of {max(nodes, 1)}", **operands)
    if limit is not None and ranks // nodes > limit:
        fact = f"{ranks // nodes} ranks per node exceed {limit} GPUs per node"
        remedy = f"use at least {-(-ranks // limit)} nodes, or fewer GPUs"
        return point.violation("M01", "num_gpus", fact, remedy, **operands)
    return None
