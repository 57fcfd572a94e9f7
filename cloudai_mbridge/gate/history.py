"""History of all imported finished runs, in an append-only SQLite file.

Runs that `import_report` returns as added are on disk when it returns, and stored once, however often and by however
many processes the report is imported. Failed runs are kept for the record, and so are runs that a gate would exclude;
levels and references use good runs only.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, ToolFailure, shown
from cloudai_mbridge.gate.history_file import (
    FAILED,
    StoredPoint,
    StoredRun,
    damage,
    failures,
    open_for_reading,
    open_for_writing,
    read_table,
    read_texts,
    read_values,
    transaction,
)
from cloudai_mbridge.gate.history_import import digest_of, insert_report, insert_run, take_runs
from cloudai_mbridge.gate.runs import METRICS, OF_FLOPS, SUCCESS, ReferencePoint, RunResult, RunValues, Values, runs_of
from cloudai_mbridge.metrics import PRIMARY
from cloudai_mbridge.plan import ROOT_FILES
from cloudai_mbridge.report.read import read_report

DEFAULT_METRIC = PRIMARY
_LAST_RUN_ID = "\U0010ffff"
_FIELDS = tuple(each.name for each in fields(StoredRun) if each.name not in ("environment", "values"))
_COLUMNS = ", ".join({"comparability_id": "key", "commit": "git_commit"}.get(name, name) for name in _FIELDS)


@dataclass(frozen=True)
class Imported:
    """Import result of a report. known: runs imported before. left_out: number of runs by reason.

    rejudged: they were there as good, and are failed from now on.
    """

    added: int
    known: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    rejudged: int = 0


@dataclass(frozen=True)
class NamedRun:
    """A run as a person finds it again."""

    run_id: str
    point: str
    ended_at: str
    commit: str | None
    nodes: tuple[str, ...]


# A good run with its environment and the value of one metric, of a curve its end; None if it has none
SeriesRun = tuple[NamedRun, Mapping[str, Any], float | None]


@dataclass(frozen=True)
class Series:
    """The last good runs of a comparability key, the oldest first, and how many failed since the first of them."""

    comparability_id: str
    metric: str
    runs: tuple[SeriesRun, ...]
    num_good: int
    num_failed: int


class History(AbstractContextManager["History"]):
    """The history in a file. Reading never changes it; the first import makes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for name in ("_reader", "_writer"):
            if (opened := vars(self).pop(name, None)) is not None:
                opened.close()

    def import_report(self, path: Path) -> Imported:
        """Import the final runs of a report.json, or of the directory that contains it: all at once, or none.

        BadInput: the report is missing, or the file is not a history.
        ToolFailure: the history cannot be written, or the report changes meanwhile.
        """
        file = path / ROOT_FILES.report if path.is_dir() else path
        digest = digest_of(file)
        report, source = read_report(path)
        if digest_of(file) != digest:
            raise ToolFailure(f"{file}: changed while it was read; import it again")
        return self.add(runs_of(report, source), digest, str(path), [point.name for point in report.left_out])

    def add(self, runs: Iterable[RunResult], digest: str, path: str, not_chosen: Iterable[str] = ()) -> Imported:
        """Import the final runs of a report with this SHA-256 and path. not_chosen: its points that were left out."""
        runs = list(runs)
        taken, left_out = take_runs(runs, path)
        with failures(self.path):
            db = self._writer
            try:
                with transaction(db):
                    report = insert_report(db, runs, taken, digest, path, not_chosen)
                    counts = Counter[str](insert_run(db, run, report) for run in taken)
            except OverflowError as error:
                raise BadInput(f"{path}: holds a number that is too large ({error}); write the report again") from None
        return Imported(counts["added"], counts["known"], left_out, counts["rejudged"])

    def points(self) -> list[StoredPoint]:
        """Return the stored points, by point and key."""
        rows = self._query(
            "SELECT point, key, count(*) FILTER (WHERE verdict = ?), count(*) FILTER (WHERE verdict = ?),"
            " max(ended_at), (SELECT value FROM metrics WHERE name = ? AND run = (SELECT id FROM judged AS r WHERE"
            " r.point = judged.point AND r.key = judged.key AND verdict = ? ORDER BY ended_at DESC, id DESC LIMIT 1))"
            " FROM judged GROUP BY point, key ORDER BY point, max(ended_at)",
            (SUCCESS, FAILED, DEFAULT_METRIC, SUCCESS),
        )
        with damage(self.path):
            found = [StoredPoint(*row) for row in rows]
            return [replace(point, last_value=_end(DEFAULT_METRIC, point.last_value)) for point in found]

    def keys(self) -> dict[str, tuple[str, ...]]:
        """Return the comparability keys, each with the points of its runs."""
        found: dict[str, tuple[str, ...]] = {}
        for point, key in self._query("SELECT DISTINCT point, key FROM runs ORDER BY point"):
            found[key] = (*found.get(key, ()), point)
        return found

    def runs(
        self,
        *,
        comparability_id: str | None = None,
        point: str | None = None,
        run_id_prefix: str | None = None,
        verdict: str | None = None,
        last: int = 20,
    ) -> list[StoredRun]:
        """Return the last runs that match all given conditions, the oldest first."""
        wanted = {
            "key = ?": comparability_id,
            "point = ?": point,
            "run_id >= ?": run_id_prefix,
            "run_id <= ?": None if run_id_prefix is None else run_id_prefix + _LAST_RUN_ID,
            "verdict = ?": verdict,
        }
        wanted = {condition: value for condition, value in wanted.items() if value is not None}
        rows = self._query(
            f"SELECT id, environment, {_COLUMNS} FROM judged WHERE {' AND '.join(wanted) or '1'}"  # noqa: S608 - both are this file's
            " ORDER BY ended_at DESC, id DESC LIMIT ?",
            (*wanted.values(), last),
        )
        rows.reverse()
        with damage(self.path):
            stored_values = self._query(
                "SELECT run, name, value FROM metrics WHERE run IN (SELECT value FROM json_each(?))"
                " AND name IN (SELECT value FROM json_each(?))",
                (json.dumps([row[0] for row in rows]), json.dumps(list(METRICS))),
            )
            measured: dict[int, dict[str, Values]] = {}
            for run, name, value in stored_values:
                measured.setdefault(run, {})[name] = read_values(name, value)
            environments = self._environments(row[1] for row in rows)
            found = []
            for i, environment, *row in rows:
                stored = dict(zip(_FIELDS, row, strict=True))
                stored |= {name: read_texts(stored[name]) for name in ("reasons", "nodes")}
                found.append(StoredRun(**stored, environment=environments[environment], values=measured.get(i, {})))
            return found

    def series(self, comparability_id: str, metric: str, last: int) -> Series:
        """Return the last good runs of a key with one metric, without TFLOP/s of runs with another FLOPs formula."""
        rows = self._query(
            "SELECT flops_formula, flops_per_step, value, environment, run_id, point, ended_at, nodes, git_commit"
            " FROM judged LEFT JOIN metrics ON run = judged.id AND name = ?"
            " WHERE key = ? AND verdict = ? ORDER BY ended_at DESC, judged.id DESC LIMIT ?",
            (metric, comparability_id, SUCCESS, last),
        )
        needed = rows[0][:2] if rows and metric == OF_FLOPS else None
        runs: list[SeriesRun] = []
        with damage(self.path):
            environments = self._environments(row[3] for row in rows)
            for *formula, stored, environment, run_id, point, ended_at, nodes, commit in reversed(rows):
                value = _end(metric, stored) if needed in (None, tuple(formula)) else None
                run = NamedRun(run_id, point, ended_at, commit, read_texts(nodes))
                runs.append((run, environments[environment], value))
        num_good = self._count(comparability_id, SUCCESS, "")
        num_failed = self._count(comparability_id, FAILED, runs[0][0].ended_at if runs else "")
        return Series(comparability_id, metric, tuple(runs), num_good, num_failed)

    def reference(
        self, comparability_id: str, last: int, without: Collection[str] = (), point: str | None = None
    ) -> ReferencePoint | None:
        """Return a reference of the last good runs of a key, and optionally a point; None without runs.

        without: ids of runs to exclude, because they are compared with it.
        """
        runs = self._others(without, last, comparability_id=comparability_id, point=point)
        if not runs:
            return None
        newest, kept = runs[-1], []
        for run in runs:  # without TFLOP/s if its FLOPs were counted by another formula
            is_same = (run.flops_formula, run.flops_per_step) == (newest.flops_formula, newest.flops_per_step)
            values = {name: value for name, value in run.values.items() if is_same or name != OF_FLOPS}
            kept.append(RunValues(run.run_id, values, run.ended_at, run.nodes))
        return ReferencePoint(
            point=newest.point,
            comparability_id=newest.comparability_id,
            comparability=self.fields(comparability_id),
            flops_formula=newest.flops_formula,
            flops_per_step=newest.flops_per_step,
            runs=tuple(kept),
            environment={**newest.environment, "nodes": list(newest.nodes)},
        )

    def reference_for(self, point: str, last: int, without: Collection[str] = ()) -> ReferencePoint | None:
        """Return a reference of the last good runs of a point under its latest key, None without runs."""
        newest = self._others(without, 1, point=point)
        return self.reference(newest[0].comparability_id, last, without, point) if newest else None

    def points_expected(self, scenario: str, system: str, without: Collection[str] = ()) -> tuple[str, ...]:
        """Return the points of the report of a scenario on a system whose last run ended last.

        Points removed from the scenario are thus dropped. without: ids of runs that the report must not contain.
        """
        rows = self._query(
            "SELECT DISTINCT point FROM held WHERE report = (SELECT id FROM reports WHERE scenario = ? AND system = ?"
            " AND ended_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM held WHERE report = reports.id"
            " AND run_id IN (SELECT value FROM json_each(?))) ORDER BY ended_at DESC, id DESC LIMIT 1) ORDER BY point",
            (scenario, system, json.dumps(list(without))),
        )
        return tuple(point for (point,) in rows)

    def fields(self, comparability_id: str) -> Mapping[str, Any]:
        """Return the fields of a comparability key."""
        rows = self._query("SELECT fields FROM keys WHERE id = ?", (comparability_id,))
        with damage(self.path):
            if not rows:
                raise LookupError(f"there is no key {shown(comparability_id)}")
            return read_table(rows[0][0])

    def _others(self, without: Collection[str], last: int, **wanted: str | None) -> list[StoredRun]:
        """Return the last good runs except the given runs, the oldest first."""
        runs = self.runs(verdict=SUCCESS, last=last + len(without), **wanted)
        return [run for run in runs if run.run_id not in without][-last:]

    def _environments(self, ids: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """Return environments by id; runs share them."""
        wanted = set(ids)
        rows = self._query(
            "SELECT id, fields FROM environments WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(wanted)),),
        )
        found = {i: read_table(environment) for i, environment in rows}
        if missing := wanted - found.keys():
            raise LookupError(f"there is no environment {min(missing)}")
        return found

    def _count(self, key: str, verdict: str, since: str) -> int:
        rows = self._query(
            "SELECT count(*) FROM judged WHERE key = ? AND verdict = ? AND ended_at >= ?", (key, verdict, since)
        )
        return int(rows[0][0])

    def _query(self, statement: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        with failures(self.path):
            return self._reader.execute(statement, tuple(values)).fetchall()

    @cached_property
    def _reader(self) -> sqlite3.Connection:
        return open_for_reading(self.path)

    @cached_property
    def _writer(self) -> sqlite3.Connection:
        return open_for_writing(self.path)


def _end(metric: str, stored: Any) -> float | None:
    """Return the value of a metric, the last value of a curve; None if missing."""
    return None if stored is None else read_values(metric, stored)[-1]
