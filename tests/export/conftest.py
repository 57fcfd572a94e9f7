"""A run that is over, and the command that exports it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import pipeline
from tests.commands.conftest import Run, mbridge_here
from tests.gate.history_data import edit_report
from tests.report.conftest import COMPLETED, EMBEDDED, ARun, a_log

__all__ = ["Run", "mbridge_here"]
NAME = "s_2026-11-01_02-00-00"
TIMES = {"t/mb1/0": 0.5, "t/mb1/1": 0.25, "t/mb2/0": 0.75}  # of a step
GOOD, FAILED, REJECTED = "mb1", "t/mb2/1", "mb3"


def end(run: ARun, key: str, log: str) -> None:
    run.ended(key, log, replace(COMPLETED, run_time_s=36.0))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Two points with two runs each, of which the last one failed at once, and a rejected point.

    t/mb2/0 says nothing of its memory.
    """
    run = ARun(tmp_path / NAME, {**EMBEDDED, "sweep": {"repeats": 2}})
    for key, time in TIMES.items():
        end(run, key, a_log(6, step_time_s=time, **({"peak_memory_gib": None} if "mb2" in key else {})))
    run.ended(FAILED, "Traceback (most recent call last):\n")
    pipeline.report(run.root)
    return run.root


def points(root: Path) -> dict[str, dict[str, Any]]:
    """Return the points of report.json by key."""
    return {point["key"]: point for point in json.loads((root / "report.json").read_text())["points"]}


def change(root: Path, key: str, **values: Any) -> None:
    """Change a point of report.json, as a run that is judged again would be."""

    def update(report: dict[str, Any]) -> None:
        for point in report["points"]:
            if point["key"] == key:
                point.update(values)

    edit_report(root / "report.json", update)
