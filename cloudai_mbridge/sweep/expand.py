"""From a definition with lists to points with scalars, one at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.files.text import label
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.sweep.axes import NUM_NODES, credentials_in_sweep, find_axes
from cloudai_mbridge.sweep.grid import Values, build_grid


@dataclass(frozen=True)
class SweepPoint:
    """One combination. `coordinates` maps the axes' names to this point's values; empty for a test without axes."""

    test_id: str
    label: str
    args: ResolvedCmdArgs
    env: Mapping[str, str]
    num_nodes: int | None
    coordinates: Mapping[str, Any]


class SweepSpace:
    """The points of one test: a grid, and the points that `[sweep] include` adds."""

    def __init__(self, definition: TestDefinition, run: TestRun) -> None:
        if problems := list(credentials_in_sweep(definition, run)):
            raise BadInput("\n".join(problems))
        self._definition, self._run = definition, run
        self.axes = find_axes(definition, run)
        self.grid = build_grid(self.axes, definition.sweep, f"test {run.id!r}")
        self._paths = {axis.name: axis.path for axis in self.axes}
        written = {name: getattr(definition.cmd_args, name) for name in definition.cmd_args.model_fields_set}
        self._fixed = {name: value for name, value in written.items() if f"cmd_args.{name}" not in self._paths.values()}

    @property
    def num_nodes(self) -> int | None:
        """The scenario's number of nodes, unless it is an axis."""
        return None if isinstance(self._run.num_nodes, list) else self._run.num_nodes

    @property
    def env(self) -> dict[str, str]:
        """The test's variables that are not axes."""
        return {name: value for name, value in self._definition.extra_env_vars.items() if isinstance(value, str)}

    def base_args(self) -> ResolvedCmdArgs:
        """Return the arguments that all points share."""
        return self._resolve(self._fixed)

    def coordinates(self, values: Values) -> dict[str, Any]:
        return dict(zip(self.grid.names, values, strict=True))

    def point(self, coordinates: Mapping[str, Any]) -> SweepPoint:
        """Return the point at these coordinates, every axis named."""
        chosen = {self._paths.get(name, f"cmd_args.{name}"): value for name, value in coordinates.items()}
        env = {name: chosen.get(f"extra_env_vars.{name}", v) for name, v in self._definition.extra_env_vars.items()}
        args = {path.removeprefix("cmd_args."): v for path, v in chosen.items() if path.startswith("cmd_args.")}
        return SweepPoint(
            test_id=self._run.id,
            label=label(coordinates),
            args=self._resolve({**self._fixed, **args}),
            env={name: str(value) for name, value in env.items()},
            num_nodes=chosen.get(NUM_NODES, self._run.num_nodes),
            coordinates=dict(coordinates),
        )

    def included(self) -> Iterator[SweepPoint]:
        """Yield the added points that are new; axes that they do not name take their first value."""
        first = {axis.name: axis.values[0] for axis in self.axes}
        seen: set[str] = set()
        for pattern in self._definition.sweep.include:
            for name in pattern:
                if name not in first and name not in ResolvedCmdArgs.model_fields:
                    raise BadInput(f"test {self._run.id!r}: sweep.include: {name!r} is neither an axis nor an argument")
            point = self.point({**first, **pattern})
            coordinates = {name: getattr(point.args, name, value) for name, value in point.coordinates.items()}
            name, names = label(coordinates), self.grid.names
            is_in_grid = coordinates.keys() == set(names) and self.grid.has(tuple(coordinates[axis] for axis in names))
            if name not in seen and not is_in_grid:
                seen.add(name)
                yield self.point(coordinates)

    def _resolve(self, args: Mapping[str, Any]) -> ResolvedCmdArgs:
        try:
            return ResolvedCmdArgs.model_validate(dict(args))
        except ValidationError as error:
            detail = error.errors()[0]
            where = f"test {self._run.id!r}: cmd_args.{detail['loc'][0]}"
            if isinstance(detail["input"], list):
                raise BadInput(f"{where}: cannot be a list here; take it out of dse_excluded_args") from None
            raise BadInput(f"{where}: {detail['msg']}") from None


def expand(definition: TestDefinition, run: TestRun) -> Iterator[SweepPoint]:
    """Yield the points of the Cartesian product, last axis fastest, then the included points."""
    sweep = SweepSpace(definition, run)
    for values in sweep.grid:
        yield sweep.point(sweep.coordinates(values))
    yield from sweep.included()
