"""Runs by name or directory, their reports, gates on them, and results as tables of pandas and Arrow."""

import io
import os
import sqlite3
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from cloudai_mbridge import pipeline
from cloudai_mbridge.completion import completion
from cloudai_mbridge.errors import BadInput, MBridgeError, counted
from cloudai_mbridge.export import load
from cloudai_mbridge.gate.policy import GatePolicy, load_policy
from cloudai_mbridge.gate.runs import without_dry_runs
from cloudai_mbridge.gate.verdict import GateResult
from cloudai_mbridge.plan.read import find_run, read_plan_data, refuse_dry_run
from cloudai_mbridge.report import build_report, model
from cloudai_mbridge.report.model import plain
from cloudai_mbridge.report.ranking import PointSummary, TestRanking, rank
from cloudai_mbridge.report.rows import STEP_COLUMNS, axis_types, axis_values, run_columns, run_rows, step_rows
from cloudai_mbridge.report.text import count_text
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.clock import PlainObserver, clock_of
from cloudai_mbridge.runner.control import RunStatus
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.tune import choosers_for

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
        columns = {}
        for name, kind, values in table.columns_of():  # integers and booleans are nullable only if a value is missing
            is_plain = kind in (int, bool) and None not in values
            columns[name] = pandas.Series(values, dtype=kind.__name__ if is_plain else _PANDAS[kind])
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


Progress = Callable[[str], object]


def drive(prepared: pipeline.Prepared, root: Path, progress: Progress | None) -> None:
    """Drive a written plan to its end and write the report, also after a failure.

    InUse: another process holds it. Paused, Interrupted, ToolFailure: it has not come to its end.
    """
    lines = cast(IO[str], _Lines(progress))
    with completion(prepared.plan, root, partial(print, file=lines)) as take_report, driver_lock(root):
        try:
            with PlainObserver(lines, prepared.plan, clock_of(prepared.plan, root)) as observer:
                pipeline.execute(
                    prepared, root, observer, choosers=choosers_for(pipeline.with_defaults(prepared), root)
                )
        except MBridgeError as error:
            error.add_note(f"results: {root}; continue with: open_run({str(root)!r}).resume()")
            with suppress(MBridgeError, OSError, sqlite3.Error):  # the first error is more informative
                take_report(pipeline.report(root))
            raise
        take_report(pipeline.report(root))


class _Lines(io.TextIOBase):
    """Calls a function with every line that is printed; one that raises is not called again, and the runs go on."""

    def __init__(self, tell: Progress | None) -> None:
        self._tell = tell

    def write(self, text: str) -> int:
        if self._tell is not None and text.strip():
            try:
                self._tell(text.rstrip("\n"))
            except Exception as error:
                self._tell = None
                warnings.warn(f"progress is not called again, as it raised {error!r}", RuntimeWarning, stacklevel=2)
        return len(text)


# Columns of the steps, with the names that tables of points have
_NAMES = {"test_id": "test", "label": "point"}
_STEPS = {_NAMES.get(name, name): kind for name, kind in STEP_COLUMNS.items()}


def open_run(run: str | os.PathLike[str] = "latest") -> "Run":
    """Return a run by its directory, the beginning of its name, or as the `latest`.

    BadInput: none or several match; the directory is not of a run, or of a dry run.
    """
    root = path_of(run)
    refuse_dry_run(root, read_plan_data(root))
    return Run(root)


def path_of(run: "Run | str | os.PathLike[str]") -> Path:
    """Return the path of a run, which may be its report.json, or its name. BadInput as `open_run`."""
    if isinstance(run, Run):
        return run.path
    if isinstance(run, str) and os.sep not in run and not os.path.lexists(run):
        return find_run(run)
    return Path(os.path.realpath(run))


@dataclass(frozen=True)
class Run:
    """A run of a scenario, by its directory; it may still be under way."""

    path: Path

    def report(self) -> "Report":
        """Judge the files of the directory; nothing is written.

        Points that have not ended are `unfinished`, with a note, whether a process drives the run or none does.
        """
        with pipeline.observing(self.path) as observed:
            return Report(**vars(build_report(self.path, observed)))

    def status(self) -> RunStatus:
        """Return the state of its points, also while it is under way."""
        return pipeline.read_status(self.path)

    def resume(self, *, progress: Progress | None = None) -> "Run":
        """Continue it after its process has ended before its jobs; nothing is submitted twice. As `Plan.run`."""
        control.require_resumable(self.path)
        prepared = pipeline.read(self.path)
        pipeline.preflight(prepared)
        drive(prepared, self.path, progress)
        return self


@dataclass(frozen=True, repr=False)
class Report(model.RunReport, Tabular):
    """Results of a run: `points`, `counts`, `succeeded` and more. Its table has a row per run of a point."""

    @property
    def rankings(self) -> tuple[TestRanking, ...]:
        """The tests with points that succeeded: their points with repeats together, the fastest first."""
        return tuple(rank(self))

    @property
    def fastest(self) -> Mapping[str, PointSummary]:
        """The fastest point of every test with several measured points, by the test's id."""
        return {ranking.test_id: ranking.best for ranking in self.rankings if ranking.best}

    @property
    def table(self) -> Table:
        return Table(run_columns(self.points), tuple(run_rows(self.points)))

    @property
    def steps(self) -> Table:
        """Every step of every run; `counted` are those after the warm-up."""
        axes = axis_types((point.coordinates for point in self.points), _STEPS)
        rows = (
            dict(zip(_STEPS, row, strict=True)) | own
            for point in self.points
            for own in (axis_values(point.coordinates, _STEPS),)
            for row in step_rows([point])
        )
        return Table({**_STEPS, **axes}, tuple(rows))

    def __repr__(self) -> str:
        return f"<Report of {self.scenario!r} on {self.system!r}: {count_text(self)}>"


RunLike = Run | str | os.PathLike[str]
_COLUMNS = {
    **{"point": str, "point_verdict": str, "metric": str, "verdict": str, "decides": bool, "unit": str},
    **{"baseline": float, "value": float, "change": float, "change_low": float, "change_high": float},
    **{"confidence": float, "p_value": float, "adjusted_p": float, "detectable": float},
    **{"num_runs": int, "num_baseline_runs": int, "waived": str, "words": str},
}


def gate_runs(
    runs: RunLike | Sequence[RunLike], *, policy: str | os.PathLike[str], baseline: str | os.PathLike[str] | None = None
) -> "Gate":
    """Judge runs, taken together, against the baseline or the history that a policy names.

    baseline: a baseline file in its place.
    NonePromoted, a BadInput: the baseline's file has none yet. BadInput: a file cannot be read.
    """
    from cloudai_mbridge.gate.run import run_gate  # imports numpy and scipy, for this call only

    loaded = load_policy(Path(policy))
    if baseline is not None:
        loaded = replace(loaded, baseline_path=Path(baseline), history_path=None)
    given, skipped = without_dry_runs(_paths(runs))
    return Gate(**vars(run_gate(given, loaded, _today()).with_notes(skipped)))


def compare_runs(
    old: RunLike | Sequence[RunLike], new: RunLike | Sequence[RunLike], *, policy: str | os.PathLike[str] | None = None
) -> "Gate":
    """Judge runs against others. policy: source of metrics and limits; default: built-in.

    BadInput: a report cannot be read.
    """
    from cloudai_mbridge.gate.run import compare_reports

    terms = load_policy(Path(policy)).policy if policy else GatePolicy(name="built-in", baseline="-")
    return Gate(**vars(compare_reports(_paths(old), _paths(new), terms, _today())[0]))


def _paths(runs: RunLike | Sequence[RunLike]) -> list[Path]:
    paths = [path_of(run) for run in ([runs] if isinstance(runs, Run | str | os.PathLike) else runs)]
    if not paths:
        raise BadInput("no runs are given; give at least one on each side")
    return paths


def _today() -> date:
    return datetime.now(UTC).date()


@dataclass(frozen=True, repr=False)
class Gate(GateResult, Tabular):
    """Result of a gate: `verdict`, `points`, `notes` and more. Its table has a row per metric of a point.

    change: relative, 0.03 is 3 % more; change_low, change_high: its bounds, each one-sided at `confidence`. Of a point
    that could not be compared there is one row without a metric.
    """

    @property
    def table(self) -> Table:
        rows: list[dict[str, Any]] = []
        for point in self.rows:
            names = {"point": point.point, "point_verdict": str(point.verdict)}
            if not point.metrics:
                rows.append(names | {"words": "; ".join(point.words)})
            for metric in point.metrics:
                low, high = metric.interval or (None, None)
                values = {name: value for name, value in vars(metric).items() if name in _COLUMNS}
                values |= {"verdict": str(metric.verdict), "change_low": low, "change_high": high}
                rows.append(names | values | {"waived": metric.waived or None, "unit": metric.unit or None})
        return Table(_COLUMNS, tuple(rows))

    def __repr__(self) -> str:
        return f"<Gate {self.verdict}: {counted(len(self.points), 'point')} against {self.reference}>"
