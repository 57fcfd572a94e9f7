"""What is read of a history, checked: others may have written the file, or damaged it.

A value passes if an import could have stored it.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cloudai_mbridge.errors import Damaged, shown
from cloudai_mbridge.files.json_text import is_deep, parse_json
from cloudai_mbridge.gate.compare.reference import Values
from cloudai_mbridge.gate.history.file import REMEDY
from cloudai_mbridge.gate.results.model import comparability_id
from cloudai_mbridge.gate.results.values import is_value_of

_MOST_SHOWN = 40


def damaged(file: Path, where: str, mistake: str) -> NoReturn:
    """Raise Damaged with the table and the row."""
    raise Damaged(f"{file}: is damaged ({where}: {mistake}); {REMEDY}")


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("not JSON")
    try:
        found = parse_json(value.encode())
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if is_deep(found):
        raise ValueError("nested too deep")
    return found


def _utc(text: str) -> str:
    """Take a time as an import writes it: such that text sorts as time does."""
    try:
        written = datetime.fromisoformat(text).astimezone(UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError):
        written = ""
    if written != text:
        raise ValueError("not a time in UTC")
    return text


_Time = Annotated[str, AfterValidator(_utc)]
_Texts = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_from_json)]
_Table = Annotated[dict[str, Any], BeforeValidator(_from_json)]


class Row(BaseModel):
    """A row of a query. Its fields have the names of the columns, as aliases where they differ."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def columns(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]


R = TypeVar("R", bound=Row)


class StoredPoint(Row):
    """The runs of one point under one comparability key. last_value: the last good run's step time, if it has one."""

    point: str
    comparability_id: str = Field(alias="key")
    num_good: int
    num_failed: int
    last_ended_at: _Time = Field(alias="ended_at")
    last_value: Any = Field(alias="value")


class NameRow(Row):
    point: str


class KeyRow(NameRow):
    key: str


class SeriesRow(Row):
    """A run of a series. value: of its metric, as it is stored."""

    run_id: str
    point: str
    ended_at: _Time
    nodes: _Texts
    git_commit: str | None
    environment: int
    flops_formula: str | None
    flops_per_step: float | None
    value: Any


class _Run(Row):
    run_id: str
    point: str
    scenario: str
    system: str
    comparability_id: str = Field(alias="key")
    verdict: Literal["success", "failed"]
    reasons: _Texts
    ended_at: _Time
    nodes: _Texts
    commit: str | None = Field(alias="git_commit")
    warmup_steps: int
    num_steps: int | None
    flops_formula: str | None
    flops_per_step: float | None


class RunRow(_Run):
    """A run as it is stored, with the id of its environment."""

    id: int
    environment: int


class StoredRun(_Run):
    """A run of the history. values: by metric. ended_at: UTC. commit: of its checkout, None where unknown."""

    environment: Mapping[str, Any]
    values: Mapping[str, Values]


class MetricRow(Row):
    """A metric of a run, as it is stored."""

    run: int
    name: str
    value: Any


class EnvironmentRow(Row):
    id: int
    fields: _Table


class FieldsRow(Row):
    """What a key stands for."""

    id: str
    fields: _Table


def checked_row(file: Path, table: str, kind: type[R], row: Mapping[str, Any]) -> R:
    """Return a row.

    Damaged: a value of it cannot be what an import stored.
    """
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        column = str(first["loc"][0])
        mistake = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        damaged(file, _where(table, row), f"{column} is {shown(row[column], _MOST_SHOWN)}: {mistake}")


def _where(table: str, row: Mapping[str, Any]) -> str:
    """Name a table and its row, by the first of its columns that can."""
    for column in ("run_id", "run", "point", "id"):
        if isinstance(row.get(column), str | int):
            return f"{table}, {column.removesuffix('_id')} {shown(row[column], _MOST_SHOWN)}"
    return table


def checked_values(file: Path, where: str, name: str, stored: Any) -> Values:
    """Return the numbers of a metric. where: the run or point that has it.

    Damaged: an import stores no such numbers.
    """
    values: Any = (stored,)
    if isinstance(stored, str):
        try:
            values = tuple(_from_json(stored))
        except (TypeError, ValueError):
            values = ()
    if not all(isinstance(value, float) for value in values) or not is_value_of(name, values):
        damaged(file, f"metrics, {where}", f"{shown(stored, _MOST_SHOWN)} is not a {name}")
    return tuple(values)


def check_key(file: Path, key: str, fields: Mapping[str, Any]) -> None:
    """Raise Damaged unless a comparability key is the digest of its fields."""
    if comparability_id(fields) != key:
        damaged(file, f"keys, id {shown(key, _MOST_SHOWN)}", "its fields have another digest")
