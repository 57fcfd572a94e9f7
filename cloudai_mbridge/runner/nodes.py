"""Nodes that have failed a run or a pre-test: no further job uses them."""

import time
from collections.abc import Iterable

from cloudai_mbridge.errors import BadInput, ToolFailure, counted
from cloudai_mbridge.models.slurm_values import expand_hostlist
from cloudai_mbridge.runner.context import RunnerContext, Tracked

_ASK_AGAIN_S = 30.0


class Nodes:
    """The excluded nodes of a run, as the journal has them."""

    def __init__(self, context: RunnerContext) -> None:
        self._context = context
        self.excluded = context.journal.excluded()  # node -> reason
        self._usable: int | None = None
        self._asked_at = float("-inf")

    def exclude(self, node: str, reason: str) -> None:
        """Exclude a node from further jobs."""
        if node not in self.excluded:
            self.excluded[node] = reason
            self._asked_at = float("-inf")
            self._context.journal.exclude(node, reason)
            self._context.observer.notice(f"node {node} is excluded: {reason}")

    def blame(self, run: Tracked, failure: str, named: Iterable[str], *, are_suspects: bool = False) -> None:
        """Exclude a run's nodes that the evidence against it names, or that are out of service.

        are_suspects: on the named nodes a job could not start. If it could start nowhere, nodes are left to try.
        """
        key = run.plan.key
        own = _names(run.status.nodes) if run.status is not None else []
        blamed = {name for nodes in named for full in _names(nodes) for name in (full, full.partition(".")[0])}
        bad = {node: f"{failure} in {key}" for node in own if node in blamed}  # a log may contain anything
        unhealthy: dict[str, str] = {}
        if run.status is not None and run.status.nodes:
            try:
                unhealthy = self._context.scheduler.unhealthy_nodes(run.status.nodes)
            except ToolFailure as error:
                self._context.observer.notice(f"{error}; it is unknown which node failed {key}")
        bad |= {node: f"{state} after {failure} in {key}" for node, state in unhealthy.items()}
        for node, reason in bad.items():
            if not are_suspects or node in unhealthy or self._can_spare(run, node):
                self.exclude(node, reason)

    def _can_spare(self, run: Tracked, node: str) -> bool:
        """Return whether a run has enough other nodes."""
        if node in {name for nodes in run.plan.nodes for name in expand_hostlist(nodes)}:
            return False
        try:
            usable = self._context.scheduler.num_usable_nodes([*self.excluded, node])
        except ToolFailure:
            return False
        return usable is not None and usable >= run.plan.num_nodes

    def shortage_for(self, run: Tracked) -> str:
        """Return why a run cannot have the nodes that it needs, "" if it can."""
        if not self.excluded or run.plan.is_pre_test:
            return ""
        needed = {name for nodes in run.plan.nodes for name in expand_hostlist(nodes)}
        if named := sorted(needed & set(self.excluded)):
            return f"it needs node {', '.join(named)}, which is excluded ({self.excluded[named[0]]})"
        usable = self._num_usable()
        if usable is None or usable >= run.plan.num_nodes:
            return ""
        excluded = "; ".join(f"{node} ({reason})" for node, reason in sorted(self.excluded.items()))
        left = f"{counted(usable, 'node')} {'is' if usable == 1 else 'are'} left"
        return f"{left} of the {run.plan.num_nodes} it needs; excluded: {excluded}"

    def _num_usable(self) -> int | None:
        """Return the number of remaining nodes, queried not too often."""
        if time.monotonic() - self._asked_at > _ASK_AGAIN_S:
            try:
                self._usable = self._context.scheduler.num_usable_nodes(self.excluded)
            except ToolFailure:
                return None  # the scheduler itself will report the problem
            self._asked_at = time.monotonic()
        return self._usable


def _names(nodes: str) -> list[str]:
    """Return the nodes of a list from a log, which may contain anything."""
    try:
        return expand_hostlist(nodes)
    except BadInput:
        return []
