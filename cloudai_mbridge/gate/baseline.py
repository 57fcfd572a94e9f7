"""Baseline file: its content, and reading and writing it.

Per point it holds its runs, a summary of its metrics, and its promotion. A gate compares with the values of its runs; a
file inconsistent with them is refused. It is written as text with a reviewable diff, and only over the file that it was
made from.
"""

import contextlib
import fcntl
import glob
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Self

import tomlkit
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from tomlkit.items import Table

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.files.documents import inline, one_per_line, render_toml
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.files.replace import replacing
from cloudai_mbridge.gate.policy import PlainDate
from cloudai_mbridge.gate.runs import METRICS, ReferencePoint, RunValues
from cloudai_mbridge.metrics import Direction
from cloudai_mbridge.models.base import ExactModel, NotBlank
from cloudai_mbridge.models.loading import validate
from cloudai_mbridge.models.toml_source import read_toml, suggest
from cloudai_mbridge.report.model import comparability_id

BASELINE_VERSION = 1
_AS_JSON = "json"
_VALUE_DIGITS, _NOISE_DIGITS = 6, 3
_VALUE_SLACK, _NOISE_SLACK = 1e-5, 1e-2  # relative; above the rounding error
_NO_NOISE = 1e-9
_EDITED = "promote again instead of editing"

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
            raise ValueError("none_until is for a baseline without points, and there are points; remove it")
        return self

    def point(self, name: str) -> BaselinePoint | None:
        """Return a point by name, or None."""
        return next((point for point in self.points if point.point == name), None)

    def references(self) -> tuple[ReferencePoint, ...]:
        """Return the reference points for a gate."""
        found = []
        for point in self.points:
            runs = []
            for run in point.runs:
                values = {name: tuple(as_list(value)) for name, value in run.values.items()}
                runs.append(RunValues(run.run_id, values, run.ended_at, tuple(run.nodes)))
            found.append(
                ReferencePoint(
                    point=point.point,
                    comparability_id=point.comparability_id,
                    comparability=point.comparability,
                    flops_formula=point.flops_formula,
                    flops_per_step=point.flops_per_step,
                    runs=tuple(runs),
                    bounds={m.name: (m.bounds.lower, m.bounds.upper) for m in point.metrics if m.bounds is not None},
                    environment=point.environment,
                )
            )
        return tuple(found)


def as_list(value: Value) -> list[float]:
    """Return the numbers of a value: a single number, or the points of a curve."""
    return value if isinstance(value, list) else [value]


def load_baseline(path: Path) -> Baseline:
    """Read a baseline and check its consistency.

    BadInput: the file is missing, invalid, or edited by hand.
    """
    source = read_toml(path)
    version = source.data.get("version")
    if version != BASELINE_VERSION or isinstance(version, bool):
        place = source.where(("version",))
        raise BadInput(f"{place}: {version!r} is unknown, {BASELINE_VERSION} is needed; use the mbridge that wrote it")
    baseline = validate(Baseline, source.data, source)
    for i, point in enumerate(baseline.points):
        if mistake := find_mistake(point):
            raise BadInput(f"{source.where(('points', i))}: {point.point!r}: {mistake}")
        if baseline.point(point.point) is not point:
            raise BadInput(f"{source.where(('points', i, 'point'))}: {point.point!r} appears twice; remove one")
    return baseline


def summarize_metric(values: Sequence[Value]) -> tuple[Value, float | None]:
    """Return the geometric mean over the runs, rounded, and the noise; None for one run."""
    curves = [as_list(value) for value in values]
    means = [_round(math.exp(fmean(map(math.log, column))), _VALUE_DIGITS) for column in zip(*curves, strict=True)]
    return means if isinstance(values[0], list) else means[0], noise_between(values)


def noise_between(values: Sequence[Value]) -> float | None:
    """Return the relative standard deviation between runs, of the last value for curves; None for one run."""
    if len(values) < 2:
        return None
    noise = stdev(math.log(as_list(value)[-1]) for value in values)
    return 0.0 if noise < _NO_NOISE else _round(noise, _NOISE_DIGITS)


def find_mistake(point: BaselinePoint) -> str:
    """Return the first inconsistency in a point, "" without one."""
    if comparability_id(point.comparability) != point.comparability_id:
        return f"comparability_id is not the digest of its [points.comparability]; {_EDITED}"
    ids = [run.run_id for run in point.runs]
    if len(set(ids)) < len(ids):
        return "a run_id appears twice, and a run counts once; remove one"
    names = [metric.name for metric in point.metrics]
    if len(set(names)) < len(names):
        return "a metric appears twice; remove one"
    if stray := sorted({name for run in point.runs for name in run.values} - set(names)):
        return f"its runs have values of {stray[0]!r}, which is not among its metrics; {_EDITED}"
    return next((mistake for metric in point.metrics if (mistake := _find_metric_mistake(metric, point))), "")


def _find_metric_mistake(metric: BaselineMetric, point: BaselinePoint) -> str:
    known = METRICS.get(metric.name)
    if known is None:
        return f"{metric.name!r} is not a metric; {suggest(metric.name, list(METRICS))}"
    if (metric.unit, metric.direction) != (known.unit, known.direction):
        return f"{metric.name} has unit {known.unit!r} and direction {str(known.direction)!r}; {_EDITED}"
    values = [run.values[metric.name] for run in point.runs if metric.name in run.values]
    if not metric.n == len(values) == len(point.runs):
        return f"{metric.name} has n = {metric.n}, {len(values)} of {len(point.runs)} runs have it; {_EDITED}"
    all_values = (*values, metric.value, metric.anchor or metric.value)
    if len({len(value) if isinstance(value, list) else 0 for value in all_values}) > 1:
        return f"{metric.name} has curves of different lengths; {_EDITED}"
    value, noise = summarize_metric(values)
    if not _are_close(metric.value, value, _VALUE_SLACK):
        return f"{metric.name} has value {metric.value!r}, its runs give {value!r}; {_EDITED}"
    if (metric.noise is None) != (noise is None) or not _are_close(metric.noise or 0.0, noise or 0.0, _NOISE_SLACK):
        return f"{metric.name} has noise {metric.noise!r}, its runs give {noise!r}; {_EDITED}"
    return ""


def _are_close(written: Value, computed: Value, slack: float) -> bool:
    pairs = zip(as_list(written), as_list(computed), strict=True)
    return all(math.isclose(a, b, rel_tol=slack, abs_tol=_NO_NOISE * slack) for a, b in pairs)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def read_bytes(path: Path) -> bytes | None:
    """Return the content of a file, None if it is missing."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); give the path of a baseline file") from None


def replace_if_unchanged(path: Path, old: bytes | None, new: bytes) -> bool:
    """Write `new` if the file holds `old` (None: is missing), and return whether it was written.

    A process killed in between leaves the old file intact; concurrent writers take turns.

    ToolFailure: the file cannot be written.
    """
    target = path.resolve()  # a link is kept, and its target replaced
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if read_bytes(target) != old:
                return False
            for left in target.parent.glob(f".{glob.escape(target.name)}.*.new"):  # left by a killed process
                left.unlink(missing_ok=True)
            with replacing(target, durable=True) as unfinished:
                unfinished.write_bytes(new)
    except OSError as error:
        raise ToolFailure(f"{path}: cannot be written ({error.strerror or error}); the old file is unchanged") from None
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file and remove it at the end, so that it is never left next to version-controlled files."""
    is_held = False
    while not is_held:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it meanwhile
                is_held = os.path.samestat(os.fstat(file.fileno()), path.stat())
            if is_held:
                try:
                    yield
                finally:  # while it is held: a waiting process sees that it is gone, and locks a new one
                    path.unlink(missing_ok=True)


def render_baseline(baseline: Baseline) -> str:
    """Return the file's text: equal baselines give equal texts.

    BadInput: a text contains half of a surrogate pair, which cannot be encoded.
    """
    document = tomlkit.document()
    document.add(tomlkit.comment("Written by `mbridge baseline promote`. Change it with that, and review the diff."))
    document.add("version", tomlkit.item(baseline.version))
    points = tomlkit.aot()
    for point in sorted(baseline.points, key=lambda point: point.point):
        points.append(_point(point))
    document.add("points", points)
    return render_toml(document)


def _point(point: BaselinePoint) -> Table:
    head = point.model_dump(exclude={"metrics", "runs", "comparability", "environment"}, exclude_none=True)
    if not point.accepted:
        del head["accepted"]
    metrics = sorted(point.metrics, key=lambda metric: list(METRICS).index(metric.name))
    runs = []
    for run in sorted(point.runs, key=lambda run: (run.ended_at, run.run_id)):
        values = {name: run.values[name] for name in METRICS if name in run.values}
        runs.append({**run.model_dump(exclude={"values"}), "values": values})
    table = tomlkit.table()
    table.trivia.indent = "\n"
    table.update(head)
    table.add("metrics", one_per_line(metric.model_dump(mode="json", exclude_none=True) for metric in metrics))
    table.add("runs", one_per_line(runs))
    table.add("comparability", _table({name: value_to_toml(value) for name, value in point.comparability.items()}))
    if point.environment:
        table.add("environment", _table(point.environment))
    return table


def _table(facts: Mapping[str, Any]) -> Table:
    """Return a sorted table; nested tables get lines of their own, except { json = ... }."""
    table = tomlkit.table()
    table.trivia.indent = "\n"
    for name, value in sorted(facts.items()):
        is_table = isinstance(value, dict) and list(value) != ["json"]
        table.add(name, _table(value) if is_table else inline(value))
    return table
