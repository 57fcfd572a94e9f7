"""A run by its name or directory, and its report."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge import pipeline
from cloudai_mbridge.api.driving import Progress, drive
from cloudai_mbridge.api.tables import Table, Tabular
from cloudai_mbridge.plan.read import find_run, read_plan_data, refuse_dry_run
from cloudai_mbridge.report import build_report, model
from cloudai_mbridge.report.formats.steps import COLUMNS, NUMBERS, TEXTS, step_rows
from cloudai_mbridge.report.formats.text import count_text
from cloudai_mbridge.report.ranking import PointSummary, TestRanking, rank
from cloudai_mbridge.report.rows import axis_types, axis_values, run_columns, run_rows
from cloudai_mbridge.runner import control
from cloudai_mbridge.runner.control import SweepStatus
from cloudai_mbridge.runner.lock import reading

# Columns of the steps, with the names that tables of points have
_NAMES = tuple({"test_id": "test", "label": "point"}.get(name, name) for name in COLUMNS)
_KINDS = [str if name in TEXTS else float if name in NUMBERS else int for name in COLUMNS]
_STEPS = dict(zip(_NAMES, _KINDS, strict=True)) | {"counted": bool}


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

        While a process drives the run, active points are `unfinished`, with a note.
        """
        with reading(self.path) as held_by:
            return Report(**vars(build_report(self.path, held_by)))

    def status(self) -> SweepStatus:
        """Return the state of its points, also while it is under way."""
        return control.read_status(self.path)

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
        return Table({**_STEPS, **axes}, tuple(self._step_rows()))

    def _step_rows(self) -> Iterator[dict[str, Any]]:
        for point in self.points:
            axes = axis_values(point.coordinates, _STEPS)
            yield from (dict(zip(_NAMES, row, strict=True)) | axes for row in step_rows([point]))

    def __repr__(self) -> str:
        return f"<Report of {self.scenario!r} on {self.system!r}: {count_text(self)}>"
