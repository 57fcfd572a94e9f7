"""The pre-test: a test that is run on every node first, and whose failing nodes are excluded from the rest."""

from dataclasses import replace

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.names import slug
from cloudai_mbridge.models.loading.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.system import LocalSystem, System
from cloudai_mbridge.models.values.hostlist import expand_hostlist
from cloudai_mbridge.plan.run import plan_run
from cloudai_mbridge.plan.run_plan import RunPlan
from cloudai_mbridge.sweep import SweepSpace, checked_points

PRE_TEST = "pre_test"
_THIS_MACHINE = "localhost"


def plan_pre_test(loaded: LoadedScenario, system: System) -> tuple[RunPlan, ...]:
    """Plan one run per node, on that node alone; none if the scenario has no pre_test.

    BadInput: the test is a sweep, breaks a rule on one node, or no file lists the nodes.
    """
    if loaded.pre_test is None:
        return ()
    if any(test.run.id == PRE_TEST for test in loaded.tests):
        raise BadInput(f"scenario {loaded.scenario.name!r}: test id {PRE_TEST!r} is the pre-test's; rename the test")
    return tuple(_on_node(loaded.pre_test, system, node) for node in _nodes(loaded, system))


def _on_node(test: LoadedTest, system: System, node: str) -> RunPlan:
    where = f"pre_test {test.definition.name!r}"
    is_local = isinstance(system, LocalSystem)
    nodes = [] if is_local else [node]
    placed = LoadedTest(test.run.model_copy(update={"nodes": nodes, "num_nodes": 1}), test.definition)
    points = list(checked_points(SweepSpace(placed.definition, placed.run), system))
    if len(points) != 1:
        raise BadInput(f"{where}: is a sweep of {len(points)} points; give one value for every argument")
    if points[0].violations:
        raise BadInput(f"{where}: {'; '.join(map(str, points[0].violations))}")
    resolved, args, recipe = points[0].resolve()
    run = plan_run(placed, resolved, args, recipe, system, 0)
    if run.upstream is not None:
        raise BadInput(f"{where}: the upstream launcher checks no single node; use launcher = 'embedded'")
    return replace(run, key=f"{PRE_TEST}/{slug(node)}/0", label=node, is_pre_test=True)


def _nodes(loaded: LoadedScenario, system: System) -> list[str]:
    """Return the nodes that the tests name, if all do, else those of the system's default partition."""
    if isinstance(system, LocalSystem):
        return [_THIS_MACHINE]
    if all(test.run.nodes for test in loaded.tests):
        lists = [nodes for test in loaded.tests for nodes in test.run.nodes]
    else:
        partitions = [each for each in system.partitions if each.name == system.default_partition]
        lists = [nodes for each in partitions for nodes in each.nodes]
        lists += [nodes for each in partitions for group in each.groups for nodes in group.nodes]
    names = list(dict.fromkeys(name for text in lists for name in expand_hostlist(text)))
    if not names:
        raise BadInput(
            f"system {system.name!r}: pre_test needs the nodes' names; list them as partitions.nodes of"
            f" {system.default_partition!r}"
        )
    return names
