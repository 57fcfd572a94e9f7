"""Content of a baseline file: per point its runs, a summary of its metrics, and its promotion."""

import contextlib
import json
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cloudai_mbridge.gate.compare.policy import PlainDate
from cloudai_mbridge.gate.compare.reference import ReferencePoint, RunValues
from cloudai_mbridge.gate.results.values import Direction
from cloudai_mbridge.models.base import ExactModel, NotBlank

_AS_JSON = "json"

Name = Annotated[str, Field(min_length=1)]  # as in the report, also with surrounding blanks
Number = Annotated[float, Field(gt=0)]
Value = Number | Annotated[list[Number], Field(min_length=1)]  # several for a curve


def value_to_toml(value: Any) -> Any:
    """Return the value, or a table { json = "..." } if it is null or otherwise not representable in TOML."""
    flat = value if isinstance(value, list) else [value]
    is_plain = all(isinstance(item, str | int | float) for item in flat)
    return value if is_plain else {_AS_JSON: json.dumps(value, sort_keys=True)}


def _from_toml(fields: Any) -> Any:
    return {name: _value_from_toml(value) for name, value in fields.items()} if isinstance(fields, dict) else fields


def _value_from_toml(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        if list(value) == [_AS_JSON]:
            return json.loads(value[_AS_JSON])
    raise ValueError(f'contains a table; only {{ {_AS_JSON} = "..." }} with a text of JSON stands for what TOML lacks')


def _json_only(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"holds what JSON does not have ({error}); write it as a text, in quotes") from None
    return value


def _moment(text: str) -> str:
    with contextlib.suppress(ValueError):
        if datetime.fromisoformat(text).tzinfo is not None:
            return text
    raise ValueError("is not a date and time with its zone; write it as 2026-01-31T12:00:00+00:00")


Facts = Annotated[dict[str, Any], AfterValidator(_json_only)]


class Bounds(ExactModel):
    """The relative changes within which a result passes."""

    lower: float = Field(le=0, gt=-1)
    upper: float = Field(ge=0, le=1)


class BaselineMetric(ExactModel):
    """One metric in short.

    value: geometric mean over the runs. noise: relative standard deviation between runs, of a curve's last value.
    anchor: the best value since a regression was last accepted; promotions may not drift away from it.
    """

    name: str
    unit: str
    direction: Annotated[Direction, Field(strict=False)]
    value: Value
    noise: float | None = Field(None, ge=0)
    n: int = Field(ge=1)
    bounds: Bounds | None = None
    anchor: Value | None = None


class BaselineRun(ExactModel):
    """One run that was promoted, with its value of every metric."""

    run_id: Name
    ended_at: str
    nodes: list[str]
    values: dict[str, Value]


class BaselinePoint(ExactModel):
    """The runs of one point. accepted: regressions accepted at the promotion."""

    point: Name
    comparability_id: Name
    flops_formula: str | None = None
    flops_per_step: float | None = None
    promoted_by: NotBlank
    promoted_at: Annotated[str, AfterValidator(_moment)]
    reason: NotBlank
    accepted: list[str] = []
    metrics: list[BaselineMetric] = Field(min_length=1)
    runs: list[BaselineRun] = Field(min_length=1)
    comparability: Annotated[Facts, BeforeValidator(_from_toml)]
    environment: Facts = {}

    def metric(self, name: str) -> BaselineMetric | None:
        """Return a metric by name, or None."""
        return next((metric for metric in self.metrics if metric.name == name), None)


class Baseline(ExactModel):
    """A whole file. none_until: nothing has been promoted yet, and something must be until the end of this day."""

    version: int
    none_until: PlainDate | None = None
    points: list[BaselinePoint] = []

    @model_validator(mode="after")
    def _none_or_some(self) -> Self:
        if self.none_until is not None and self.points:
            raise ValueError("none_until says that nothing has been promoted, and there are points; remove it")
        return self

    def point(self, name: str) -> BaselinePoint | None:
        """Return a point by name, or None."""
        return next((point for point in self.points if point.point == name), None)

    def references(self) -> tuple[ReferencePoint, ...]:
        """Return the reference points for a gate."""
        return tuple(
            ReferencePoint(
                point=point.point,
                comparability_id=point.comparability_id,
                comparability=point.comparability,
                flops_formula=point.flops_formula,
                flops_per_step=point.flops_per_step,
                runs=tuple(map(_run_values, point.runs)),
                bounds={m.name: (m.bounds.lower, m.bounds.upper) for m in point.metrics if m.bounds is not None},
                environment=point.environment,
            )
            for point in self.points
        )


def as_list(value: Value) -> list[float]:
    """Return the numbers of a value: a single number, or the points of a curve."""
    return value if isinstance(value, list) else [value]


def _run_values(run: BaselineRun) -> RunValues:
    values = {name: tuple(as_list(value)) for name, value in run.values.items()}
    return RunValues(run.run_id, values, run.ended_at, tuple(run.nodes))
