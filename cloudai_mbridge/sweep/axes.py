"""Axes of a test's sweep."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.credentials import find_credential
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.training.credentials.find import is_secret

NUM_NODES = "num_nodes"
ENV = "env."  # before the name of a variable that is an axis


@dataclass(frozen=True)
class Axis:
    """One dimension: a key path such as "cmd_args.tp", "extra_env_vars.X" or "num_nodes", and its values."""

    path: str
    values: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Short name: the argument's, or env.X for a variable."""
        return self.path.removeprefix("cmd_args.").replace("extra_env_vars.", ENV, 1)


def find_axes(definition: TestDefinition, run: TestRun) -> list[Axis]:
    """Return the axes in field order: arguments, environment variables, nodes. The last one varies fastest."""
    args = definition.cmd_args
    values = {f"cmd_args.{name}": getattr(args, name) for name in type(args).model_fields}
    values |= {f"extra_env_vars.{name}": value for name, value in definition.extra_env_vars.items()}
    values[NUM_NODES] = run.num_nodes
    axes = [Axis(path, tuple(value)) for path, value in values.items() if _is_axis(value, path, definition)]
    if empty := [axis.path for axis in axes if not axis.values]:
        raise BadInput(f"test {run.id!r}: {empty[0]}: [] is empty; list at least one value, or remove the key")
    return axes


def credentials_in_sweep(definition: TestDefinition, run: TestRun) -> Iterator[str]:
    """Yield a line for every credential among the axes and patterns, whose values are names of points and columns."""
    for axis in find_axes(definition, run):
        if is_secret(axis.name) or any(map(_is_credential, axis.values)):
            yield f"test {run.id!r}: {axis.path} is a credential and cannot be an axis; give one value"
    patterns = [*definition.sweep.include, *definition.sweep.exclude]
    named = {name for pattern in patterns for name, value in pattern.items() if _names_credential(name, value)}
    for name in sorted(named):
        yield f"test {run.id!r}: sweep: {name} is a credential and cannot be a coordinate; remove it"


def _is_credential(value: Any) -> bool:
    return isinstance(value, str) and find_credential(value) is not None


def _names_credential(name: str, value: Any) -> bool:
    """Return whether a pattern holds a credential, by its coordinate's name or by its values."""
    values = value if isinstance(value, list) else [value]
    return is_secret(name.removeprefix(ENV)) or any(map(_is_credential, values))


def _is_axis(value: Any, path: str, definition: TestDefinition) -> bool:
    """Return whether a value is an axis: a list, unless its path or a parent is excluded. Only arguments hold lists."""
    excluded = any(path == prefix or path.startswith(f"{prefix}.") for prefix in definition.dse_excluded_args)
    if excluded and isinstance(value, list) and not path.startswith("cmd_args."):
        raise BadInput(f"dse_excluded_args: {path} cannot be a list; take it out, or give one value")
    return isinstance(value, list) and not excluded
