"""Results as tables: the one place that makes pandas and Arrow of rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudai_mbridge.export import load
from cloudai_mbridge.report.model import plain

if TYPE_CHECKING:
    import pandas
    import pyarrow

_ARROW = {str: "string", int: "int64", float: "float64", bool: "bool_"}
_PANDAS = {str: "str", int: "Int64", float: "float64", bool: "boolean"}


class Tabular(ABC):
    """Base of objects with a table."""

    @property
    @abstractmethod
    def table(self) -> "Table":
        """The rows, with the types of their columns."""

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the rows as a DataFrame. ToolFailure: pandas is not installed."""
        pandas, table = load("pandas", "pandas"), self.table
        columns = {
            name: pandas.Series(values, dtype=_pandas_type(kind, values)) for name, kind, values in table.columns_of()
        }
        return pandas.DataFrame(columns)

    def to_arrow(self) -> "pyarrow.Table":
        """Return the rows as an Arrow table. ToolFailure: pyarrow is not installed."""
        pa, table = load("pyarrow", "pyarrow"), self.table
        types = {kind: getattr(pa, name)() for kind, name in _ARROW.items()}
        return pa.table({name: pa.array(values, type=types[kind]) for name, kind, values in table.columns_of()})


@dataclass(frozen=True, repr=False)
class Table(Tabular):
    """Rows of plain values. columns: their names in order, with types of `str`, `int`, `float` and `bool`.

    A row may lack a column, or have None there; numbers that are not finite are themselves.
    """

    columns: Mapping[str, type]
    rows: Sequence[Mapping[str, Any]]

    @property
    def table(self) -> "Table":
        return self

    def __repr__(self) -> str:
        return f"<Table of {len(self.rows)} rows: {', '.join(self.columns)}>"

    def columns_of(self) -> Iterator[tuple[str, type, list[Any]]]:
        """Yield every column: name, type, values."""
        for name, kind in self.columns.items():
            values = (row.get(name) for row in self.rows)
            yield name, kind, [plain(str(value)) if kind is str and value is not None else value for value in values]


def _pandas_type(kind: type, values: Sequence[Any]) -> str:
    """Return a column's type: integers and booleans are nullable types of pandas only if a value is missing."""
    return _PANDAS[kind] if kind in (str, float) or None in values else kind.__name__
