"""What this version reads but does not do yet. It refuses to run such a scenario rather than leave a part out."""

from collections.abc import Iterator

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.base import is_secret
from cloudai_mbridge.models.load import LoadedScenario, LoadedTest
from cloudai_mbridge.models.system import System
from cloudai_mbridge.plan.upstream import may_be_upstream, refuse_upstream
from cloudai_mbridge.sweep import find_axes


def refuse_unsupported(loaded: LoadedScenario, system: System) -> None:
    """Raise BadInput with one line for every part of the scenario that would be left out, or that a launcher lacks."""
    tests = [*loaded.tests, *([loaded.pre_test] if loaded.pre_test else [])]
    missing = list(_in_scenario(loaded)) + [line for test in tests for line in _in_test(test, system)]
    if missing:
        raise BadInput("\n".join(dict.fromkeys(missing)))


def _in_scenario(loaded: LoadedScenario) -> Iterator[str]:
    if value := loaded.scenario.post_test:
        yield f"scenario {loaded.scenario.name!r}: post_test = {value!r} is not implemented yet; remove it"


def _in_test(test: LoadedTest, system: System) -> Iterator[str]:
    where, definition = f"test {test.run.id!r}", test.definition
    if may_be_upstream(definition):
        yield from refuse_upstream(test, system)
    elif not definition.cmd_args.model_recipe_name:  # type: ignore[attr-defined]
        yield f"{where}: cmd_args.model_recipe_name is missing; name a recipe (see `mbridge list`)"
    for axis in find_axes(definition, test.run):
        if is_secret(axis.name):
            yield f"{where}: {axis.path} is a credential and cannot be an axis; give one value"
    patterns = [*definition.sweep.include, *definition.sweep.exclude]
    for name in sorted({name for pattern in patterns for name in pattern if is_secret(name.removeprefix("env."))}):
        yield f"{where}: sweep: {name} is a credential and cannot be a coordinate; remove it"
    for node in (*test.run.nodes, *test.run.exclude_nodes):
        if ":" in node:
            yield f"{where}: nodes: {node!r} (PARTITION:GROUP:COUNT) is not implemented; list the nodes' names"
    if definition.nsys is not None and definition.nsys.enable:
        yield f"{where}: nsys is not implemented yet; remove the table or set enable = false"
    if definition.agent != "grid_search":
        yield f"{where}: agent = {definition.agent!r} is unknown; use 'grid_search'"
    if definition.predictor is not None:
        yield f"{where}: predictor is not implemented; remove the table"
