"""Walk the grid of a test, one point at a time."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.test_definition import MegatronBridgeTestDefinition
from cloudai_mbridge.sweep.axes import NUM_NODES, find_axes
from cloudai_mbridge.sweep.run_id import label


@dataclass(frozen=True)
class SweepPoint:
    """One combination. `coordinates` maps the axes' names to this point's values; empty for a test without axes."""

    test_id: str
    label: str
    args: ResolvedCmdArgs
    env: Mapping[str, str]
    num_nodes: int | None
    coordinates: Mapping[str, Any]


def expand(definition: MegatronBridgeTestDefinition, run: TestRun) -> Iterator[SweepPoint]:
    """Yield the points of the Cartesian product, last axis fastest; a combination that occurs twice is yielded once."""
    axes = find_axes(definition, run)
    args = {name: getattr(definition.cmd_args, name) for name in definition.cmd_args.model_fields_set}
    seen: set[tuple[Any, ...]] = set()
    for values in itertools.product(*(axis.values for axis in axes)):
        if values in seen:
            continue
        seen.add(values)
        chosen = {axis.path: value for axis, value in zip(axes, values, strict=True)}
        coordinates = {axis.name: value for axis, value in zip(axes, values, strict=True)}
        yield SweepPoint(
            test_id=run.id,
            label=label(coordinates),
            args=_resolve(run.id, _choose("cmd_args", args, chosen)),
            env={
                name: str(value) for name, value in _choose("extra_env_vars", definition.extra_env_vars, chosen).items()
            },
            num_nodes=chosen.get(NUM_NODES, run.num_nodes),
            coordinates=coordinates,
        )


def _resolve(test_id: str, args: dict[str, Any]) -> ResolvedCmdArgs:
    try:
        return ResolvedCmdArgs.model_validate(args)
    except ValidationError as error:
        names = ", ".join(dict.fromkeys(f"cmd_args.{detail['loc'][0]}" for detail in error.errors()))
        raise BadInput(f"test {test_id!r}: {names}: cannot be a list here; take it out of dse_excluded_args") from None


def _choose(table: str, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: chosen.get(f"{table}.{name}", value) for name, value in values.items()}
