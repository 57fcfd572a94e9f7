"""Table of exported results: a row per run of a point, or per point, with the same columns."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudai_mbridge import pipeline
from cloudai_mbridge.errors import MBridgeError
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.metrics import MEASURES, summarize
from cloudai_mbridge.plan.read import is_dry_run
from cloudai_mbridge.report.build import build_report
from cloudai_mbridge.report.columns import ARGUMENTS, COLUMNS, METRICS, columns_with
from cloudai_mbridge.report.model import PointReport, RunReport
from cloudai_mbridge.report.ranking import gpu_hours
from cloudai_mbridge.report.read import read_report
from cloudai_mbridge.report.rows import measure_cells, run_cells
from cloudai_mbridge.verdict import Verdict

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunTable:
    """The rows of a run; every row has every column, and None where something is not known or not finite.

    axes: columns of axes that are not in `ARGUMENTS`. run: the name of the run's directory.
    so_far: what is to be noted while the run has not ended, "" after it.
    """

    run: str
    scenario: str
    system: str
    reported_at: datetime
    axes: tuple[str, ...]
    rows: tuple[Row, ...]
    so_far: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(columns_with(dict.fromkeys((*ARGUMENTS, *self.axes), object)))

    @property
    def ran(self) -> tuple[Row, ...]:
        """The rows without rejected points and checks of nodes."""
        return tuple(row for row in self.rows if row["verdict"] != Verdict.REJECTED and not row["pre_test"])

    def id_of(self, row: Row | None = None) -> str:
        """Return an id that is equal for every export of this run, or of a row of it: 32 hexadecimal digits."""
        names = () if row is None else (row["test"], row["point"], row["iteration"])
        return digest(self.scenario, self.system, self.run, *names)


def digest(*values: Any) -> str:
    """Return a digest of values: 32 hexadecimal digits."""
    return hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def read_table(path: Path, *, by_point: bool = False) -> RunTable:
    """Read the report of a run's directory, or a report.json. BadInput as `read_report`.

    Before the run has ended, the table contains the results so far.

    by_point: a row for each point. Its metrics are over its successful runs, and n is their number.
    """
    report, name, so_far = None, path.resolve().name, ""
    if path.is_dir() and (built := _read_so_far(path)) is not None:
        ended = [point for point in built.points if point.verdict is not Verdict.UNFINISHED]
        report, so_far = replace(built, points=tuple(ended)), built.notes[0]
    if report is None:
        report, file = read_report(path)
        name = file.resolve().parent.name
    names = dict.fromkeys(name for point in report.points for name in point.coordinates if name not in ARGUMENTS)
    axes = {name: visible(f"axis.{name}" if name in COLUMNS else name) for name in names}
    table = RunTable(
        run=visible(name),
        scenario=visible(report.scenario),
        system=visible(report.system),
        reported_at=_time(report.created_at) or datetime.fromtimestamp(0, UTC),
        axes=tuple(axes.values()),
        rows=(),
        so_far=so_far,
    )
    groups: dict[tuple[Any, ...], list[PointReport]] = {}
    for number, point in enumerate(report.points):
        groups.setdefault((point.test_id, point.label, 0 if by_point else number), []).append(point)
    return replace(table, rows=tuple(_row(table, runs, axes, by_point=by_point) for runs in groups.values()))


def _read_so_far(root: Path) -> RunReport | None:
    """Return the results so far of a run that has not ended, None of any other."""
    if is_dry_run(root):
        return None
    with suppress(MBridgeError):  # `read_report` fails for the same reason, or needs no more than report.json
        with pipeline.observing(root) as observed:
            report = build_report(root, observed) if observed.is_open else None
        return report if report is not None and (observed.held_by or report.is_unfinished) else None
    return None


def _row(table: RunTable, runs: Sequence[PointReport], axes: Mapping[str, str], *, by_point: bool) -> Row:
    """Return the row of a run, or of all runs of a point, which shows the first unsuccessful run."""
    good = [run for run in runs if run.verdict is Verdict.SUCCESS]
    shown = next((run for run in runs if run.verdict is not Verdict.SUCCESS), runs[0])
    fields = shown.comparability["fields"] if shown.comparability else {}
    values = {
        **run_cells(shown),
        **({"iteration": None} if by_point else {}),
        **{"run": table.run, "scenario": table.scenario, "system": table.system, "pre_test": shown.is_pre_test},
        **{"runs": 0 if shown.verdict is Verdict.REJECTED else len(runs), "good_runs": len(good)},
        **{name: shown.coordinates.get(name, shown.args.get(name)) for name in ARGUMENTS},
        **{column: shown.coordinates.get(name) for name, column in axes.items()},
        **{"recipe": fields.get("recipe"), "gpu": fields.get("device"), "dtype": fields.get("dtype")},
        **(_over_runs(good) if by_point else _measured(shown)),
        **_jobs(runs),
    }
    cells = {name: values.get(name) for name in table.columns}
    return {name: _number(value) if name in METRICS else _plain(value) for name, value in cells.items()}


def _measured(run: PointReport) -> dict[str, Any]:
    if run.metrics is None:
        return {}
    definitions = {name: getattr(run.metrics, name) for name in ("memory_kind", "flops_formula")}
    key = run.comparability["id"] if run.comparability else None
    return {**measure_cells(run.metrics), **definitions, "comparability": key}


def _over_runs(good: Sequence[PointReport]) -> dict[str, Any]:
    """Return the metrics of a point: each number is the mean of its runs' numbers; the peak memory is the largest.

    Definitions are those that are equal in all runs.
    """
    rows = [_measured(run) for run in good]
    names = ("memory_kind", "flops_formula", "comparability")
    values = {name: rows[0].get(name) for name in names if len({row.get(name) for row in rows}) == 1}
    for measure in MEASURES:
        columns = measure.columns
        over = summarize([_number(row.get(measure.column)) for row in rows])
        if not measure.is_statistic:
            values[measure.name] = over and (over.max if measure.over == "largest" else over.mean)
        elif over:
            plain = summarize([_number(row.get(columns["mean"])) for row in rows])
            spread = over.std if over.n > 1 else None
            found = {"capped_mean": over.mean, "capped_std": spread, "mean": plain and plain.mean, "n": over.n}
            values |= {column: found[number] for number, column in columns.items()}
    return values


def _jobs(runs: Sequence[PointReport]) -> dict[str, Any]:
    """Return the last job of a run, or the combined usage of several runs' jobs."""
    attempts = [attempt for run in runs for attempt in run.attempts]
    started = [time for run in runs if (time := _time(run.job.get("started_at")))]
    ended = [time for run in runs if (time := _time(run.job.get("ended_at")))]
    times = [time for attempt in attempts if (time := attempt.get("run_time_s")) is not None]
    is_known = bool(times) and None not in map(_number, times) and all(run.world_size for run in runs)
    return {
        "gpu_hours": gpu_hours(runs) if is_known else None,
        "job_id": runs[0].job.get("job_id") if len(runs) == 1 else None,
        "attempts": len(attempts),
        "nodes": " ".join(dict.fromkeys(node for run in runs for node in run.environment.get("nodes") or ())) or None,
        "started_at": min(started, default=None),
        "ended_at": max(ended, default=None) if len(ended) == len(runs) else None,
    }


def _time(value: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= sys.float_info.max else None


def _plain(value: Any) -> Any:
    """Return a cell: printable text, a finite number, a bool, a time, or None."""
    if isinstance(value, float):
        return _number(value)
    if value is None or isinstance(value, bool | int | datetime):
        return value
    return visible(value if isinstance(value, str) else str(value)) or None


# For MLflow and W&B, without unknown values
_PARAMETERS = (
    *("scenario", "system", "test", "point", "iteration", *ARGUMENTS),
    *("recipe", "gpu", "dtype", "num_nodes", "world_size"),
)
_RESULTS = ("verdict", "reason", "failure", "job_id", "attempts", "nodes", "memory_kind", "flops_formula")
DEFAULT_NAME = "mbridge"  # of an experiment or project


def parameters(table: RunTable, row: Row) -> dict[str, object]:
    """Return the requested arguments and coordinates."""
    return {name: row[name] for name in (*_PARAMETERS, *table.axes) if row[name] is not None}


def results(row: Row) -> dict[str, object]:
    """Return the results that are not metrics."""
    return {name: row[name] for name in _RESULTS if row[name] is not None}


def metrics(row: Row) -> dict[str, float]:
    """Return the measured metrics."""
    return {name: float(row[name]) for name in METRICS if row[name] is not None}


def name_of(row: Row) -> str:
    """Return the display name: TEST/POINT/ITERATION."""
    return "/".join(str(row[name]) for name in ("test", "point", "iteration") if row[name] is not None)
