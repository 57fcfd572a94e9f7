"""A run that is over, and the command that exports it."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import cli, pipeline
from tests.gate.history_data import edit_report
from tests.report.conftest import COMPLETED, EMBEDDED, ARun, a_log

Run = Callable[..., tuple[int, str, str]]
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


@pytest.fixture
def mbridge_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in this process; return the exit code, and what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mbridge", *map(str, argv)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return (int(exit_.value.code or 0), *capsys.readouterr())

    return run


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
